// The groups of a World. A new group is connected (gloo or NCCL), then checked by a known sum; that sum is
// also the barrier after which no member needs the store for it any more.

#include "titan/dist/world.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <ATen/ops/full.h>

#include "call_checker.h"
#include "fake_backend.h"
#include "host_backend.h"
#include "own_timeout.h"
#include "world_impl.h"

namespace titan::dist {

std::unique_ptr<GroupBackends> World::Impl::make_backends(const std::vector<int>& ranks,
                                                          const std::string& name, const std::string& key,
                                                          int rank) {
  const int size = static_cast<int>(ranks.size());
  if (size == 1) return nullptr;
  auto backends = std::make_unique<GroupBackends>();
  if (backend == "fake") {
    backends->main = make_fake_group(rank, size);
    return backends;
  }
  const GroupSpec sockets = spec_of(name, key, "gloo", rank, size),
                  host = spec_of(name, key, "host", rank, size);
  const auto make_host = [sockets, host, address = gloo, direct = direct_memory && on_one_host(ranks)] {
    auto group = make_gloo_group(sockets, address);
    auto faster = direct ? make_host_group(host, group) : nullptr;
    return faster ? faster : group;
  };
  if (backend == "gloo") {
    backends->main = make_host();
  } else {
    backends->main = devices->make_group(spec_of(name, key, "nccl", rank, size));
    backends->make_host = make_host;
  }
  return backends;
}

bool World::Impl::on_one_host(const std::vector<int>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return hosts[rank] == hosts[ranks[0]]; });
}

namespace {

/// Short whatever the number of ranks: first, last, count and a hash (FNV-1a).
std::string fingerprint(const std::vector<int>& ranks) {
  uint64_t hash = 14695981039346656037ULL;
  for (const int rank : ranks) hash = (hash ^ static_cast<uint64_t>(rank)) * 1099511628211ULL;
  return str(ranks.front(), "-", ranks.back(), "x", ranks.size(), ".", hash);
}

}  // namespace

std::shared_ptr<Group> World::Impl::make_group(const std::vector<int>& ranks, const std::string& name,
                                               const std::string& purpose) {
  const auto me = std::find(ranks.begin(), ranks.end(), launch.rank);
  const std::string key = str(purpose, ".", fingerprint(ranks));
  std::unique_ptr<GroupBackends> backends;
  if (me != ranks.end()) {
    try {
      backends = make_backends(ranks, name, key, static_cast<int>(me - ranks.begin()));
    } catch (const c10::Error& error) {
      throw Error(str("rank ", launch.rank, " couldn't join group '", name, "' of ", ranks.size(),
                      " ranks: ", error.what_without_backtrace()));
    }
  }
  std::unique_ptr<CallChecker> checker;
  if (check_collectives && backends)
    checker = std::make_unique<CallChecker>(
        spec_of(name, key, "calls", static_cast<int>(me - ranks.begin()), static_cast<int>(ranks.size())),
        ranks);
  auto group = std::make_shared<Group>(Group::Parts{.name = name,
                                                    .purpose = purpose,
                                                    .ranks = ranks,
                                                    .my_world_rank = launch.rank,
                                                    .backends = std::move(backends),
                                                    .recorder = recorder,
                                                    .checker = std::move(checker)});
  if (group->contains_me() && group->size() > 1 && backend != "fake") check_sum(*group);
  return group;
}

void World::Impl::check_sum(Group& group) const {
  at::Tensor sum = at::full({3}, group.rank() + 1, at::TensorOptions(at::kFloat).device(device));
  group.all_reduce(sum, ReduceOp::Sum, {"dist::check_sum"}).wait();
  const double expected = group.size() * (group.size() + 1) / 2.0;
  const double got = sum.sum().item<double>();
  TITAN_CHECK(got == 3 * expected, "group '", group.name(), "': the ", backend, " sum of 1..", group.size(),
              " came out as ", got / 3, " instead of ", expected,
              ": the ranks run different builds, or the network damages data");
}

int World::rank() const { return impl_->launch.rank; }
int World::size() const { return impl_->launch.size; }
int World::local_rank() const { return impl_->launch.local_rank; }
int World::local_size() const { return impl_->launch.local_size; }
const std::string& World::backend() const { return impl_->backend; }
const std::string& World::launched_by() const { return impl_->launch.by; }
c10::Device World::device() const { return impl_->device; }
std::chrono::seconds World::timeout() const { return impl_->timeout; }
c10d::Store& World::store() const { return *impl_->store; }
FlightRecorder& World::recorder() const { return *impl_->recorder; }
std::shared_ptr<FlightRecorder> World::shared_recorder() const { return impl_->recorder; }

void World::set_timeout(std::chrono::seconds timeout) const {
  std::lock_guard lock(impl_->mutex);
  impl_->timeout = timeout;
  for (auto& [ranks_and_purpose, group] : impl_->groups)
    if (!ranks_and_purpose.second.starts_with(kOwnTimeout)) group->set_timeout(timeout);
}

std::shared_ptr<Group> World::group(const std::vector<int>& ranks, const std::string& name,
                                    const std::string& purpose) const {
  TITAN_CHECK(!ranks.empty() && std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>()) &&
                  ranks.front() >= 0 && ranks.back() < size(),
              "group '", name, "' wants ascending ranks of a world of ", size(), ", got ", ranks.size(),
              " others");
  std::lock_guard lock(impl_->mutex);
  auto& group = impl_->groups[{ranks, purpose}];
  if (!group) group = impl_->make_group(ranks, name, purpose);
  return group;
}

std::shared_ptr<Group> World::everyone() const {
  std::vector<int> ranks(static_cast<size_t>(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group(ranks, "world");
}

}  // namespace titan::dist
