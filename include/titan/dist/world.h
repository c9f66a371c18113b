#pragma once

// The processes of a job: this rank, its connection to the others, and process groups over any list of ranks.
//
//   dist::World world = dist::init();  // before the first tensor
//   auto group = world.everyone();
//   const double mean = group->sum(loss, {"metrics::loss"}) / world.size();

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace titan::dist {

struct InitOptions {
  std::string backend = "auto";       ///< "auto" (nccl on GPUs, else gloo), "gloo", "nccl", "fake"
  std::string device = "auto";        ///< "auto" (a GPU if one is visible, with "fake" the CPU), "cpu", "cuda"
  std::chrono::seconds timeout{300};  ///< for rendezvous and for every group's collectives until set_timeout
  /// Ranks of one host copy from each other's memory (process_vm_readv), where the kernel allows it, instead
  /// of through gloo's sockets. Results are the same except for the rounding of sums. Set it to false to
  /// measure or rule out the difference.
  bool direct_memory = true;
  size_t flight_entries = 2048;  ///< calls that the flight recorder keeps; 0 records none
  /// Compares every collective with the other members' before it starts (and a received tensor with the sent
  /// one before it is waited for): operation, sizes, dtype, label. A difference is an Error on all of them
  /// that names the calls. So are calls of different groups in which two ranks wait for each other. Costs a
  /// small gather on the host for each call.
  bool check_collectives = false;
  int fake_rank = 0;  ///< backend "fake" only: this process plays rank `fake_rank` of `fake_world_size`
  int fake_world_size = 1;
};

class FlightRecorder;
class Group;

/// A handle (shared, cheap to copy) on this process's place in the job. Ends its groups when the last handle
/// goes.
class World {
 public:
  int rank() const;
  int size() const;
  int local_rank() const;  ///< position among the ranks of this host
  int local_size() const;
  const std::string& backend() const;  ///< "gloo", "nccl" or "fake"
  /// "torchrun", "titan" (titan launch), "env" (plain RANK and WORLD_SIZE), "openmpi", "slurm", "none" or
  /// "fake"
  const std::string& launched_by() const;
  /// This rank's device: cuda:<local_rank modulo the number of GPUs> if the CUDA plugin is open, else cpu.
  c10::Device device() const;
  std::chrono::seconds timeout() const;
  /// For calls of all groups from now on (a first step may take longer than later ones).
  void set_timeout(std::chrono::seconds timeout) const;

  /// The group of the given world ranks (ascending; position = group rank), made once per list and purpose.
  /// All its members have to make their groups in the same order. Other ranks needn't take part, and get a
  /// group whose `contains_me()` is false. Groups of the same ranks with different purposes are independent:
  /// their collectives need no common order.
  std::shared_ptr<Group> group(const std::vector<int>& ranks, const std::string& name,
                               const std::string& purpose = "") const;
  /// The group of all ranks.
  std::shared_ptr<Group> everyone() const;

  c10d::Store& store() const;
  /// The ring of this rank's calls. The shared pointer keeps it after the World is gone.
  FlightRecorder& recorder() const;
  std::shared_ptr<FlightRecorder> shared_recorder() const;

  struct Impl;
  explicit World(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// Reads torchrun's, SLURM's, Open MPI's or no environment (one rank), meets the other ranks at a TCP store,
/// and checks every group by a known sum when it is made. Opens the CUDA plugin if a GPU is visible, so it
/// must be called before the first tensor is made. Throws ConfigError if environments disagree, Error with
/// the missing ranks after the time limit.
World init(const InitOptions& options = {});

/// Prefix for the purpose of a group that keeps its own time limit: World::set_timeout leaves it alone. For
/// groups whose calls are made by threads other than the training thread.
inline constexpr std::string_view kOwnTimeout = "own_timeout:";

/// Prefix for the purpose of a group whose receives wait beside the computation for their messages, as those of pipelines and rings do. NCCL's
/// kernels, which wait on the device, then take few multiprocessors from it.
inline constexpr std::string_view kLongReceives = "long_receives:";

/// Tells the other ranks, through the job's store, that this one fails with `message`. Returns the message of
/// the first rank that failed ("rank 2: ..."), or "" if that is this rank: when a rank is lost, its neighbors
/// notice, then theirs, and each knows only of the one before. If the store is gone, returns that rank 0
/// probably is, too. Then calls `let_go` once, which ends the calls that the others wait for, so that they
/// fail and report, too. Rank 0, which keeps the store, waits for them at most two seconds. Neither this nor
/// `let_go` may throw.
std::string tell_failure(const World& world, const std::string& message, const std::function<void()>& let_go);

}  // namespace titan::dist
