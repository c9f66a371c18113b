#pragma once

#include "json_file.h"
#include "pre_tokenizer.h"

namespace titan::data::bpe {

/// What `pre_tokenizer` of a tokenizer.json describes. Throws ConfigError with the part that isn't
/// understood.
PreTokenizer read_pre_tokenizer(const JsonFile& file);

}  // namespace titan::data::bpe
