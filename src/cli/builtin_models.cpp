#include "cli/builtin_models.h"

namespace titan::cli {

void register_builtin_models() {}

}  // namespace titan::cli
