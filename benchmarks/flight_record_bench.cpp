// Cost of recording a call in the flight recorder: start a record, wait for it, finish it.
//
//   flight_record_bench [--calls N] [--runs N] [--most NANOSECONDS]
//
// Prints one JSON object of medians: nanoseconds per call on one thread; nanoseconds per call while a second
// thread records into the same ring; and the time to write the file of a full ring of 20,000 calls. Fails if
// the first is more than --most.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "dist/flight_record.h"
#include "guard/flight_dump.h"
#include "titan/core/error.h"

namespace {

using namespace titan;
using Clock = std::chrono::steady_clock;

constexpr size_t kEntries = 20000;

double nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

/// Records calls as Group::launch does: fill in the record, start it, wait, finish it.
void record_calls(dist::FlightRecorder& recorder, const dist::GroupRecord* group, int64_t calls) {
  const std::vector<int64_t> in = {4096}, out = {8, 4096};
  for (int64_t i = 0; i < calls; ++i) {
    dist::CallRecord call;
    call.op = dist::CollectiveOp::AllGather;
    call.group = group;
    call.sequence = static_cast<uint64_t>(i);
    call.bytes = 8 * 4096 * 4;
    call.dtype = c10::ScalarType::Float;
    call.set_label("fsdp::unshard", "layers.12.feed_forward");
    call.in.set(in);
    call.out.set(out);
    const uint64_t number = recorder.start(call);
    recorder.wait(number);
    recorder.finish(number, dist::CallState::Finished);
  }
}

template <class Measure>
double median(int runs, Measure measure) {
  std::vector<double> times;
  for (int i = 0; i < runs; ++i) times.push_back(measure());
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int run(const std::vector<std::string>& args) {
  int64_t calls = 200'000;
  int runs = 5;
  double most_ns = std::numeric_limits<double>::infinity();
  TITAN_CHECK(args.size() % 2 == 0, "usage: flight_record_bench [--calls N] [--runs N] [--most NANOSECONDS]");
  for (size_t i = 0; i < args.size(); i += 2) {
    if (args[i] == "--calls")
      calls = std::stoll(args[i + 1]);
    else if (args[i] == "--runs")
      runs = std::stoi(args[i + 1]);
    else if (args[i] == "--most")
      most_ns = std::stod(args[i + 1]);
    else
      TITAN_CHECK(false, "unknown option ", args[i]);
  }
  auto recorder = std::make_shared<dist::FlightRecorder>(kEntries);
  const dist::GroupRecord* group = recorder->add_group("dp_shard", "", {0, 1, 2, 3, 4, 5, 6, 7});
  const auto one_thread = [&] {
    const auto start = Clock::now();
    record_calls(*recorder, group, calls);
    return nanoseconds_since(start) / static_cast<double>(calls);
  };
  const double alone = median(runs, one_thread);
  std::atomic<bool> ends{false};
  std::thread other([&] {
    while (!ends) record_calls(*recorder, group, 1000);
  });
  const double shared = median(runs, one_thread);
  ends = true;
  other.join();
  const auto folder = std::filesystem::temp_directory_path() / str("flight_record_bench_", ::getpid());
  double written = 0;
  {
    dist::FlightDump dump(recorder, {.folder = folder});
    written = median(runs, [&] {
      const auto start = Clock::now();
      TITAN_CHECK(dump.write("benchmark") == 0, "cannot write to ", folder.string());
      return nanoseconds_since(start);
    });
  }
  std::filesystem::remove_all(folder);
  std::cout << "{\"call_ns\": " << alone << ", \"call_beside_another_thread_ns\": " << shared
            << ", \"write_20000_ms\": " << written / 1e6 << "}" << std::endl;
  TITAN_CHECK(alone <= most_ns, "a call takes ", alone, " ns, more than --most ", most_ns);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
