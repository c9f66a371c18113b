#pragma once

// Meeting the other ranks at the job's store.

#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "dist/environment.h"

namespace c10d {
class Store;
}

namespace titan::dist {

/// A rank's description of itself for the others.
struct Peer {
  std::string host;     ///< host_identity()
  std::string address;  ///< the host's, on the route to the store; "" for a loopback or unknown one
};

struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<Peer> peers;  ///< by rank
};

/// Meets the other ranks. Throws Error that lists the ranks missing after `timeout`, and ConfigError if two
/// processes claim one rank or have different world sizes. A world of one gets a store in memory, without a
/// socket.
Rendezvous meet(const Launch& launch, std::chrono::milliseconds timeout);

/// A store of this process alone.
c10::intrusive_ptr<c10d::Store> make_private_store();

/// Returns when all ranks have called it, or after a few seconds.
void wait_for_all_at_end(c10d::Store& store, const Launch& launch);

/// Says that this rank no longer needs the store. The rank that serves it returns when all have said so, or
/// after a few seconds: otherwise a quick rank 0 would take the store away from the others.
void leave(c10d::Store& store, const Launch& launch);

/// Whether something listens there.
bool accepts_connections(const std::string& host, int port);

/// getnameinfo's flags for a call from the code at `code`: LibTorch's libraries get no names ([Note: names of
/// peers] in rendezvous.cpp).
int name_flags(const void* code, int flags);

/// The arguments of getnameinfo.
struct NameQuery {
  const sockaddr* address = nullptr;
  socklen_t address_bytes = 0;
  char* host = nullptr;
  socklen_t host_bytes = 0;
  char* service = nullptr;
  socklen_t service_bytes = 0;
  int flags = 0;
};
/// libc's getnameinfo; for callers in LibTorch without a name server. See [Note: names of peers].
int name_of_peer(const void* caller, const NameQuery& query);

}  // namespace titan::dist
