#pragma once

// Names of hosts in LibTorch's messages ([Note: names of peers] in peer_names.cpp).

namespace titan::dist {

/// Whether the code at this address is in a library of LibTorch's.
bool is_of_libtorch(const void* code);

}  // namespace titan::dist
