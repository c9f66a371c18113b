#include "cli/builtin_models.h"

#include "titan/models/llama3_spec.h"

namespace titan::cli {

void register_builtin_models() { models::register_llama3(); }

}  // namespace titan::cli
