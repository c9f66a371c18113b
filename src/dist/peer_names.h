#pragma once

// Names of hosts in LibTorch's messages ([Note: names of peers] in peer_names.cpp).

#include <cstdint>

namespace titan::dist {

/// How often LibTorch asked for a name and was given the address. For tests.
int64_t num_names_withheld();

}  // namespace titan::dist
