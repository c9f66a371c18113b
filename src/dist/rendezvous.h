#pragma once

// Finding the others: the store, who has come, and whether they fit together.

#include <chrono>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "dist/environment.h"

namespace c10d {
class Store;
}

namespace titan::dist {

/// What a rank tells the others about itself.
struct Peer {
  std::string host;  ///< host name and boot id: equal for two ranks of one host, which its containers with
                     ///< names of their own aren't
  std::string
      address;  ///< of its host, on the route to the store; "": that is a loopback one, or can't be told
};

struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<Peer> peers;  ///< by rank
};

/// Meets the other ranks. Throws Error that lists the ranks that haven't come within `timeout`, and
/// ConfigError when two processes claim one rank or were told different world sizes. A world of one gets a
/// store in memory: no socket.
Rendezvous meet(const Launch& launch, std::chrono::milliseconds timeout);

/// A store of this process alone.
c10::intrusive_ptr<c10d::Store> make_private_store();

/// Says that this rank needs the store no more; the rank that serves it returns when all have said so, or
/// after a few seconds. Without this, a quick rank 0 would take the store from under the others.
void leave(c10d::Store& store, const Launch& launch);

// Names of hosts in LibTorch's messages ([Note: names of peers] in peer_names.cpp).

/// getnameinfo's flags for who calls from `code`: a library of LibTorch's isn't given names.
int name_flags(const void* code, int flags);

}  // namespace titan::dist
