#pragma once

// Ranks of NCCL that are threads of this process.

#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <nccl.h>

#include "virtual_gpu_test.h"

namespace virtual_gpu_test {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

inline constexpr auto a_while = 200ms;
inline constexpr size_t long_message = size_t{1} << 20;  // floats; more than is in transit between two ranks

inline bool is_strict() {
  const char* mode = std::getenv("VIRTUAL_GPU_NCCL");
  return mode && std::string_view(mode) == "strict";
}

template <class Condition>
bool holds_soon(Condition condition) {
  for (const auto end = steady_clock::now() + 20s; !condition(); std::this_thread::sleep_for(1ms))
    if (steady_clock::now() > end) return false;
  return true;
}

inline ncclConfig_t non_blocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

inline ncclResult_t state_of(ncclComm_t communicator) {
  ncclResult_t state = ncclInternalError;
  EXPECT_EQ(ncclCommGetAsyncError(communicator, &state), ncclSuccess);
  return state;
}
inline bool becomes_ready(ncclComm_t communicator) {
  return holds_soon([&] { return state_of(communicator) != ncclInProgress; }) &&
         state_of(communicator) == ncclSuccess;
}

// A rank has a stream and some numbers on the device, which are its number at first.
struct Rank {
  explicit Rank(int number = 0) : number(number) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), long_message * sizeof(float)), cudaSuccess);
    set(static_cast<float>(number));
  }
  ~Rank() {
    if (communicator) ncclCommAbort(communicator);
    cudaStreamSynchronize(stream);
    cudaFree(data);
    cudaStreamDestroy(stream);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void set(float value) {
    const std::vector<float> values(long_message, value);
    EXPECT_EQ(
        cudaMemcpyAsync(data, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice, stream),
        cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  std::vector<float> numbers(size_t count) const {
    std::vector<float> values(count);
    EXPECT_EQ(cudaMemcpyAsync(values.data(), data, count * sizeof(float), cudaMemcpyDeviceToHost, stream),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return values;
  }
  float first() const { return numbers(1)[0]; }

  ncclResult_t sum(ncclComm_t with, size_t count = 1) const {
    return ncclAllReduce(data, data, count, ncclFloat, ncclSum, with, stream);
  }
  ncclResult_t gather(ncclComm_t with, size_t count = 1) const {
    return ncclAllGather(data + static_cast<size_t>(number) * count, data, count, ncclFloat, with, stream);
  }
  ncclResult_t send(int peer, size_t count = 1) const {
    return ncclSend(data, count, ncclFloat, peer, communicator, stream);
  }
  ncclResult_t receive(int peer, size_t count = 1) const {
    return ncclRecv(data, count, ncclFloat, peer, communicator, stream);
  }
  bool is_done() const { return cudaStreamQuery(stream) == cudaSuccess; }
  bool ends() const {
    return holds_soon([&] { return is_done(); });
  }
  bool stays_busy() const {
    std::this_thread::sleep_for(a_while);
    return !is_done();
  }
  void abort() { EXPECT_EQ(ncclCommAbort(std::exchange(communicator, nullptr)), ncclSuccess); }

  int number;
  ncclComm_t communicator = nullptr;
  cudaStream_t stream = nullptr;
  float* data = nullptr;
};

// Calls the function for each rank, all at the same time.
inline void on_all(std::vector<std::unique_ptr<Rank>>& ranks, const std::function<void(Rank&)>& function) {
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) threads.emplace_back([&function, &rank] { function(*rank); });
  for (std::thread& thread : threads) thread.join();
}

/// They are connected for sums, of which one thread may then call all ranks'.
inline std::vector<std::unique_ptr<Rank>> make_ranks(int size,
                                                     ncclConfig_t config = NCCL_CONFIG_INITIALIZER) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_unique<Rank>(rank));
  ncclUniqueId id;
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  on_all(ranks, [&](Rank& rank) {
    ncclConfig_t own = config;
    const ncclResult_t result = ncclCommInitRankConfig(&rank.communicator, size, id, rank.number, &own);
    EXPECT_EQ(result, config.blocking == 0 ? ncclInProgress : ncclSuccess);
    EXPECT_TRUE(becomes_ready(rank.communicator));
    for (const size_t count : {size_t{1}, long_message}) {
      rank.sum(rank.communicator, count);
      EXPECT_TRUE(becomes_ready(rank.communicator));
    }
    rank.set(static_cast<float>(rank.number));
  });
  return ranks;
}

// A call on a thread of its own, which may wait for another rank.
class Call {
 public:
  explicit Call(std::function<ncclResult_t()> call)
      : result_(std::async(std::launch::async, std::move(call))) {}
  bool has_returned() const { return result_.wait_for(0s) == std::future_status::ready; }
  bool waits() const {
    std::this_thread::sleep_for(a_while);
    return !has_returned();
  }
  ncclResult_t result() { return result_.get(); }

 private:
  std::future<ncclResult_t> result_;
};

}  // namespace virtual_gpu_test
