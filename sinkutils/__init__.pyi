"""The public names. Editors and type checkers read them here, and `__init__.py`, which loads them on first use."""

# ruff: isort: skip_file
# In the order of docs/api.md
from sinkutils.model.config import AttentionSpec as AttentionSpec
from sinkutils.model import attention as attention
from sinkutils.model.attention import attend as attend
from sinkutils.model.config import LMConfig as LMConfig
from sinkutils.model.decoder import TransformerLM as TransformerLM
from sinkutils.measuring.measure import measure as measure
from sinkutils.measuring.maps import report as report
from sinkutils.measuring.compare import compare as compare
from sinkutils.measuring import families as families
from sinkutils.measuring import surgery as surgery
from sinkutils.measuring import sinkcheck as sinkcheck
from sinkutils.measuring.callback import SinkCallback as SinkCallback
from sinkutils.names import probe as probe
from sinkutils.names import load_lm as load_lm
from sinkutils.study.corpus import load_corpus as load_corpus
from sinkutils.study.grid import config as config
from sinkutils.study.grid import experiments as experiments
from sinkutils.study.train import train as train
from sinkutils.study.store import record as record
from sinkutils.study.frames import runs as runs
from sinkutils.study.frames import blocks as blocks
from sinkutils.study.frames import heads as heads
from sinkutils.study.frames import curves as curves
from sinkutils.study.frames import compare_runs as compare_runs
from sinkutils.ledger.table import claims as claims
from sinkutils.ledger.table import claim_checks as claim_checks
from sinkutils.ledger.table import verdict as verdict
from sinkutils.plots.theme import theme as theme
from sinkutils.plots.theme import save as save
from sinkutils.plots.interactive import explore as explore
from sinkutils.plots.interactive import film as film
from sinkutils.plots.interactive import Interactive as Interactive
from sinkutils.plots.report import report_page as report_page
from sinkutils.plots.report import report_model as report_model

__version__: str
