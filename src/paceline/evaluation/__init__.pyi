from .baselines import COMPRESSORS as COMPRESSORS, compressed_bits as compressed_bits
from .card import (
    model_card as model_card,
)
from .gate import (
    EXAM as EXAM,
    EXCEPTED as EXCEPTED,
    LINEAGE as LINEAGE,
    TRAINING_DATA as TRAINING_DATA,
    decide as decide,
)
from .generation import generate as generate
from .held_out import (
    SHORTEST_PREFIX_BYTES as SHORTEST_PREFIX_BYTES,
    HeldOutDocument as HeldOutDocument,
    choose_conversations as choose_conversations,
    choose_prefixes as choose_prefixes,
    joined as joined,
    share_of as share_of,
    slice_rows as slice_rows,
)
from .overlap import find_overlap as find_overlap
from .report import (
    as_frame as as_frame,
    as_markdown as as_markdown,
    judgement_lines as judgement_lines,
    plot_report as plot_report,
)
from .run import (
    compare as compare,
    download_model as download_model,
    score_on_ranks as score_on_ranks,
)
from .scoring import (
    Resampler as Resampler,
    ngram_subject as ngram_subject,
    score_models as score_models,
    score_share as score_share,
)
from .tasks import read_tasks as read_tasks, score_tasks as score_tasks, task_rows as task_rows
from .text_model import (
    AllowedCode as AllowedCode,
    Ranks as Ranks,
    TextModel as TextModel,
    device_for as device_for,
)
from .transformer import score_transformer as score_transformer, windows as windows
from .user_code import require_metrics as require_metrics, with_metrics as with_metrics
