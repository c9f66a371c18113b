#include "cli/builtin_models.h"

#include "titan/models/llama3.h"

namespace titan::cli {

void register_builtin_models() {
  static const bool once = [] {
    models::register_llama3();
    return true;
  }();
  (void)once;
}

}  // namespace titan::cli
