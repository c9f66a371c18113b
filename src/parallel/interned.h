#pragma once

#include <string>

namespace titan {

/// A copy of the text that lives as long as the process. Records of collectives keep a module's name and may
/// be read after the module is destroyed.
const char* interned(const std::string& text);

}  // namespace titan
