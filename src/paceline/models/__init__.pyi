from .adapters import (
    Adapters as Adapters,
    add_adapters as add_adapters,
    base_name as base_name,
    merge_adapters as merge_adapters,
    set_magnitudes as set_magnitudes,
    without_adapters as without_adapters,
)
from .attention import exclude_from_compilation as exclude_from_compilation
from .card import (
    CARD_FILE as CARD_FILE,
    MAX_CARD_BYTES as MAX_CARD_BYTES,
    card_text as card_text,
    read_card as read_card,
)
from .config import (
    BY_LENGTH as BY_LENGTH,
    SEPARATOR_BYTE as SEPARATOR_BYTE,
    ModelConfig as ModelConfig,
    ModelShape as ModelShape,
    UserCodeConfig as UserCodeConfig,
    config_for as config_for,
    count_parameters as count_parameters,
    require_tokenizer as require_tokenizer,
)
from .description import (
    SINGLE as SINGLE,
    is_unread as is_unread,
    require_described as require_described,
    require_tensors as require_tensors,
)
from .files import (
    CONFIG_FILE as CONFIG_FILE,
    DESCRIBING as DESCRIBING,
    INDEX_FILE as INDEX_FILE,
    PROGRAM_FILE as PROGRAM_FILE,
    TOKENIZER_CONFIG_FILE as TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE as TOKENIZER_FILE,
    config_of as config_of,
    file_sha256 as file_sha256,
    is_pretrained as is_pretrained,
    json_object as json_object,
    lies_as_pretrained as lies_as_pretrained,
    local_model_digest as local_model_digest,
    model_digest as model_digest,
    read_config as read_config,
    read_index as read_index,
    read_json as read_json,
    read_user_code as read_user_code,
    require_whole as require_whole,
    user_code_of as user_code_of,
    weight_files as weight_files,
    weights_digest as weights_digest,
)
from .pretrained import (
    OtherStage as OtherStage,
    Pretrained as Pretrained,
    cut_stage as cut_stage,
)
from .program import exported as exported, write_program as write_program
from .tensor_files import (
    cut_groups as cut_groups,
    fill as fill,
    not_finite as not_finite,
    require_finite as require_finite,
    stored_tensors as stored_tensors,
)
from .transformer import (
    Transformer as Transformer,
    attend_over_rows as attend_over_rows,
    new_model as new_model,
    output_layer as output_layer,
)
from .weights import (
    SavedTransformer as SavedTransformer,
    file_groups as file_groups,
    load_model as load_model,
    save_model as save_model,
)
