#pragma once

// Names of hosts in LibTorch's messages ([Note: names of peers] in peer_names.cpp).

namespace titan::dist {

/// getnameinfo's flags for who calls from `code`: a library of LibTorch's isn't given names.
int name_flags(const void* code, int flags);

}  // namespace titan::dist
