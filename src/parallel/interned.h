#pragma once

#include <string>

namespace titan {

/// The same text for the life of the process: records of collectives keep a module's name and may be read
/// when the module is gone.
const char* interned(const std::string& text);

}  // namespace titan
