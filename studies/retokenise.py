"""The token files of a text with another tokenizer, from those that are at hand: one text is carried, not two.

    python studies/retokenise.py FROM TO

FROM: a folder of token files. TO: a folder that has the meta.json and the tokenizer.json of the corpus that is wanted.
Raises ValueError unless the result is what that meta.json says, byte for byte.
"""

import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sinkutils.study.corpus import SPLITS, Corpus, verified

source, target = Corpus(Path(sys.argv[1])), Path(sys.argv[2])
tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
tokenizer.encode_special_tokens = True
eos = tokenizer.token_to_id("<eos>")
for split in SPLITS:
    with (target / f"{split}.bin").open("wb") as file:
        documents = [ids.tolist() for ids in source.documents(split)]
        for first in range(0, len(documents), 1000):
            texts = source.tokenizer.decode_batch(
                documents[first : first + 1000], skip_special_tokens=False
            )
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                file.write(np.array([*encoding.ids, eos], dtype=np.uint16).tobytes())
print(verified(target))
