#pragma once

namespace titan::cli {

/// Registers the models that come with the library. An explicit call, because a linker may drop a file of the
/// library whose only use is a static initializer. Does nothing the second time.
void register_builtin_models();

}  // namespace titan::cli
