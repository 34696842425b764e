"""The one table of names. A network that is listed here is trained, exported, checked and tested without further mention."""

from __future__ import annotations

from runtime.errors import UnknownName

from .alexnet import ALEXNETS
from .architecture import Architecture
from .bert import BERTS
from .densenet import DENSENETS
from .googlenet import GOOGLENETS
from .gpt import GPTS
from .kernel_regression import KERNEL_REGRESSION
from .lenet import LENET
from .linear import LINEAR, SOFTMAX
from .mlp import MLP_ARCHITECTURE
from .nin import NINS
from .recurrent import GRU, LSTM, RNN
from .resnet import RESNETS
from .seq2seq import SEQ2SEQ, SEQ2SEQ_ATTENTION
from .transformer import TRANSFORMERS
from .vgg import VGGS

CATALOG: dict[str, Architecture] = {
    entry.name: entry
    for entry in (
        LINEAR,
        SOFTMAX,
        MLP_ARCHITECTURE,
        LENET,
        *ALEXNETS,
        *VGGS,
        *NINS,
        *GOOGLENETS,
        *RESNETS,
        *DENSENETS,
        KERNEL_REGRESSION,
        RNN,
        GRU,
        LSTM,
        SEQ2SEQ,
        SEQ2SEQ_ATTENTION,
        *TRANSFORMERS,
        *BERTS,
        *GPTS,
    )
}


def find(name: str) -> Architecture:
    if name not in CATALOG:
        raise UnknownName.of("architecture", name, CATALOG)
    return CATALOG[name]
