// All ranks agree on which ranks share memory; on GPUs, overlapped products through it equal plain ones.

#include <cstdlib>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "dist/device_backend.h"
#include "distributed/world.h"
#include "parallel/peer_memory.h"
#include "parallel/tensor/exchanges.h"
#include "titan/core/error.h"
#include "unit/golden.h"
#include "unit/parallel/overlapped_mlp.h"

namespace titan::tp {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

// Devices with one pair that can't share memory, as the higher rank of the two sees it.
class DevicesApart final : public dist::DeviceBackend {
 public:
  DevicesApart(int rank, int lower, int higher) : rank_(rank), lower_(lower), higher_(higher) {}
  std::string device_address() const override { return str("host ", rank_); }
  std::string why_no_symmetric_memory(const std::string& address) const override {
    return rank_ == higher_ && address == str("host ", lower_) ? "nothing joins them" : "";
  }
  std::unique_ptr<dist::SymmetricMemory> make_symmetric_memory(const dist::GroupSpec&) override {
    return nullptr;
  }
  c10::DeviceType device_type() const override { return at::kCUDA; }
  int num_devices() const override { return 1; }
  void set_device(int) override {}
  std::string device_name(int) const override { return ""; }
  int num_multiprocessors(int /*index*/) const override { return 1; }
  int compute_capability(int) const override { return 0; }
  c10::intrusive_ptr<c10d::Backend> make_group(const dist::GroupSpec&) override { return {}; }
  std::unique_ptr<dist::DeviceGraph> make_graph() override { return nullptr; }
  bool is_recorded(const c10::Stream&) const override { return false; }
  dist::DeviceMemory memory(int) const override { return {}; }
  void lock_pages(void*, int64_t) override {}
  void unlock_pages(void*) override {}
  void watch_out_of_memory(std::function<void(const dist::OutOfMemory&)>) override {}
  void reset_peak_memory(int) override {}
  void record_memory_history(int64_t) override {}
  std::string memory_snapshot() override { return ""; }

 private:
  int rank_, lower_, higher_;
};

TEST(PeerMemoryChoice, AllRanksLearnOfAPairWithoutPeerAccess) {
  const auto group = world().everyone();
  const int last = group->size() - 1;
  EXPECT_EQ(why_not_all_share(*group, DevicesApart(group->rank(), 0, last)),
            str("rank ", last, " can't share memory with rank 0: nothing joins them"));
  EXPECT_EQ(why_not_all_share(*group, DevicesApart(group->rank(), -1, -1)), "");
}

TEST(PeerMemoryChoice, SendsPartsWithoutNccl) {
  if (world().everyone()->backend_name() == "nccl") GTEST_SKIP() << "these ranks share memory";
  const DeviceMesh mesh = DeviceMesh::create(world(), {{"tp", world().size()}});
  const CountedExchange chosen = choose_exchange(mesh["tp"])("");
  EXPECT_EQ(dynamic_cast<const PeerMemoryExchange*>(chosen.exchange.get()), nullptr);
  EXPECT_EQ(chosen.exchange->count(), world().size());
  EXPECT_EQ(chosen.traffic->calls, 0);
}

TEST(PeerMemoryChoice, SettingsOverrideTheChoice) {
  const DeviceMesh mesh = DeviceMesh::create(world(), {{"tp", world().size()}});
  const CountedExchange sent = choose_exchange(mesh["tp"], OverlapTransport::SendReceive)("");
  EXPECT_EQ(dynamic_cast<const PeerMemoryExchange*>(sent.exchange.get()), nullptr);
  EXPECT_EQ(sent.traffic->way, "sent and received");
  if (mesh["tp"].group()->backend_name() == "nccl") GTEST_SKIP() << "symmetric memory may be there";
  std::string problem;
  try {
    choose_exchange(mesh["tp"], OverlapTransport::SymmetricMemory);
  } catch (const ConfigError& error) {
    problem = error.what();
  }
  EXPECT_NE(problem.find("\"symmetric_memory\": the backend is"), std::string::npos) << problem;
}

// On virtual GPUs so far.
TEST(PeerMemoryOnGpu, EqualsPlainProducts) {
  if (!device().is_cuda()) GTEST_SKIP() << "on GPUs only";
  setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1", 1);  // ranks share GPUs where there are too few
  const auto group = world().everyone();
  const auto store = c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world().store());
  // Rank 0 has met before, in a group that no other rank knows of.
  if (group->rank() == 0)
    dist::device_backend()
        ->make_symmetric_memory(
            {.name = "peer_memory_test of one",
             .store = c10::make_intrusive<c10d::PrefixStore>("peer_memory_test of one", store),
             .rank = 0,
             .size = 1,
             .world_ranks = {0},
             .timeout = std::chrono::seconds(30)})
        ->reserve(1024);
  const auto exchange = std::make_shared<const PeerMemoryExchange>(
      std::make_shared<PeerPieces>(PeerPieces{dist::device_backend()->make_symmetric_memory(
          {.name = "peer_memory_test",
           .store = c10::make_intrusive<c10d::PrefixStore>("peer_memory_test", store),
           .rank = group->rank(),
           .size = group->size(),
           .world_ranks = group->ranks(),
           .timeout = std::chrono::seconds(30)})}));
  for (const int64_t sequence : {12, 24, 12, 24}) {
    const MlpTensors whole = whole_mlp(sequence, options_of(at::kDouble));
    const at::Tensor expected = plain_output(whole);
    backward(whole, expected);
    const MlpTensors mlp = part_of(whole, group->rank(), group->size());
    const at::Tensor output = overlapped_output(mlp, exchange);
    backward(mlp, output);
    for (size_t which = 0; which < 5; ++which)
      EXPECT_CLOSE(which == 0 ? output : mlp.leaves()[which - 1].grad(),
                   expected_part(whole, expected, which, group->rank(), group->size()), 1e-10)
          << "sequence " << sequence << ", result " << which;
  }
}

}  // namespace
}  // namespace titan::tp
