#pragma once

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}

namespace titan::dist {

/// A new connection to `store`'s server; null where that doesn't take one. A socket is tried first, as c10d's
/// client would go on trying, and say so each time, for as long as its time limit.
c10::intrusive_ptr<c10d::Store> connect_again(c10d::Store& store);

}  // namespace titan::dist
