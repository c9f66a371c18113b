// Saves and loads a whole checkpoint; pytorch/dcp_bench.py does the same with PyTorch.
//
//   titan launch -n 2 -- checkpoint_bench [--folder DIR] [--runs N] [--threads N] [--compute-ms T]
//   [--span-ms T] [--memory DIR] [--only save | async | taken | model]
//
// The state is the 134M Llama's parameters and AdamW's two moments (1.6 GB in fp32), cut by rows over all
// ranks. Prints a JSON object of medians over the runs (default 5, after a warm-up run), each of the slowest
// rank:
//   save_s            a synchronous save
//   async_blocked_s   how long an asynchronous save blocks its caller when the call makes the copy
//   staged_blocked_s  the same when the copy is made during T ms of computing (default 300)
//   async_total_s     until the save is on disk
//   load_s, load_warm_s                a load without and with the files in the page cache
//   gigabytes                          size of all ranks' tensors
//   save_extra_mib, async_extra_mib    peak memory of a rank above what it had before
//   model_s, model_extra_mib           the same for saving the model alone
//
// Computation is slower while a copy is made. staged_blocked_s is the sum of staged_called_s (the time in the
// call), the wait for the copy after the T ms, and staged_lost_s: the time that the products missing in the T
// ms would have taken, judged by the number done in T ms just before, when nothing else was running. (A save
// whose call makes the copy also follows T ms of computing, as in a run.)
//
// async_taken_s and staged_taken_s are everything that a save takes from the computation at the same time.
// They cover --span-ms (4,000; longer if the save isn't on disk by then) from the call on, minus the time
// that the products done in this span take when nothing else is running.
//
// Then the same in memory (--memory DIR, default /dev/shm). memory_blocked_s, memory_total_s (until the
// generation is complete) and memory_load_s are for all ranks on one host, which makes no copies.
// peers_blocked_s, peers_total_s and peers_load_s treat each rank as if it were on a separate host: its file
// is copied to the next rank's memory over the group's sockets. For peers_lost_load_s the memory of one of
// these hosts is lost, and its ranks fetch their files from the copies.
//
// --only model: only the model alone; --only save: only synchronous saves, and loads; --only async: only
// asynchronous saves whose call makes the copy; --only taken: only async_taken_s and staged_taken_s.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "checkpoint/peer/peer_folder.h"
#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"

namespace {

using namespace titan;
using namespace titan::checkpoint;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int64_t kDim = 768, kHidden = 2048, kLayers = 12, kVocabulary = 32000;

using Options = std::map<std::string, std::string>;
using Figures = std::map<std::string, std::vector<double>>;

Options parse(const std::vector<std::string>& args) {
  Options options = {{"folder", "/var/tmp"}, {"runs", "5"},          {"threads", "2"}, {"compute-ms", "300"},
                     {"span-ms", "4000"},    {"memory", "/dev/shm"}, {"only", ""}};
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    TITAN_CHECK(args[i].starts_with("--") && options.contains(args[i].substr(2)), "unknown option ", args[i]);
    options[args[i].substr(2)] = args[i + 1];
  }
  TITAN_CHECK(args.size() % 2 == 0, args.back(), " needs a value");
  const std::string& only = options["only"];
  TITAN_CHECK(only.empty() || only == "save" || only == "async" || only == "taken" || only == "model",
              "--only needs save, async, taken or model");
  return options;
}

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// ---- memory of this process

double memory_mib(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(key)) return std::stod(line.substr(key.size() + 1)) / 1024;
  throw Error("no " + key + " in /proc/self/status");
}

// Peak memory above the memory at construction.
class ExtraMemory {
 public:
  ExtraMemory() {
    std::ofstream("/proc/self/clear_refs") << "5";  // the peak counts from here
    before_ = memory_mib("VmRSS");
  }
  double mib() const { return memory_mib("VmHWM") - before_; }

 private:
  double before_ = 0;
};

// ---- the saved state

std::vector<std::pair<std::string, std::vector<int64_t>>> sizes() {
  std::vector<std::pair<std::string, std::vector<int64_t>>> result = {
      {"tok_embeddings.weight", {kVocabulary, kDim}},
      {"norm.weight", {kDim}},
      {"output.weight", {kVocabulary, kDim}}};
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = str("layers.", layer, ".");
    for (const char* name : {"wq", "wk", "wv", "wo"})
      result.push_back({prefix + "attention." + name + ".weight", {kDim, kDim}});
    for (const char* name : {"w1", "w3"})
      result.push_back({prefix + "feed_forward." + name + ".weight", {kHidden, kDim}});
    result.push_back({prefix + "feed_forward.w2.weight", {kDim, kHidden}});
    for (const char* name : {"attention_norm", "ffn_norm"})
      result.push_back({prefix + name + ".weight", {kDim}});
  }
  return result;
}

class Tensors final : public Stateful {
 public:
  Tensors(const DeviceMesh& mesh, const std::vector<std::string>& kinds) {
    for (const std::string& kind : kinds)
      for (const auto& [name, shape] : sizes()) {
        const std::vector<Placement> placements = {Placement::shard(0)};
        const Box box = local_box(shape, mesh, placements);
        tensors_.push_back({kind + name, DTensor{at::randn(box.length), mesh, placements, shape, box}});
      }
  }
  ObjectState state() override { return {.tensors = tensors_, .text = ""}; }
  void loaded(const std::string&) override {}
  std::vector<Parameter> parameters() const {
    std::vector<Parameter> all;
    for (const ObjectTensor& tensor : tensors_) {
      Parameter& parameter = all.emplace_back();
      parameter.name = tensor.name;
      parameter.data = tensor.data;
    }
    return all;
  }
  int64_t num_bytes() const {
    int64_t total = 0;
    for (const ObjectTensor& tensor : tensors_) total += static_cast<int64_t>(tensor.data.local.nbytes());
    return total;
  }

 private:
  std::vector<ObjectTensor> tensors_;
};

// ---- measuring

class Bench {
 public:
  Bench(const dist::World& world, const Options& options)
      : world_(world),
        mesh_(DeviceMesh::create(world, {{"fsdp", world.size()}})),
        folder_(std::filesystem::path(options.at("folder")) / "checkpoint_bench"),
        memory_(std::filesystem::path(options.at("memory")) / "checkpoint_bench"),
        runs_(std::stoi(options.at("runs"))),
        threads_(std::stoi(options.at("threads"))),
        compute_(std::stoi(options.at("compute-ms"))),
        span_(std::stoi(options.at("span-ms"))),
        only_(options.at("only")),
        model_(mesh_, {""}),
        optimizer_(mesh_, {"exp_avg.", "exp_avg_sq."}) {}

  void run() {
    if (only_.empty() || only_ == "save") synchronous();
    if (only_.empty() || only_ == "model") model_alone();
    if (only_.empty() || only_ == "async") asynchronous(AsyncMode::Copied, "async");
    if (only_.empty() || only_ == "taken") {
      all_that_is_taken(AsyncMode::Copied, "async");
      all_that_is_taken(AsyncMode::Staged, "staged");
    }
    if (only_.empty()) {
      asynchronous(AsyncMode::Staged, "staged");
      clear();
      in_memory(memory_ / "host", "memory");
      if (world_.size() > 1) in_memory(memory_ / str("host_", world_.rank()), "peers");
    }
    const auto bytes = static_cast<double>(model_.num_bytes() + optimizer_.num_bytes());
    const double gigabytes = mesh_.group()->sum(bytes, {"bench::bytes"}) * 1e-9;
    if (world_.rank() != 0) return;
    std::filesystem::remove_all(folder_);
    std::filesystem::remove_all(memory_);
    std::cout << "{\"gigabytes\": " << gigabytes;
    for (const auto& [name, values] : figures_)
      std::cout << ", \"" << name
                << "\": " << (name.ends_with("_mib") ? *std::ranges::max_element(values) : median(values));
    std::cout << "}" << std::endl;
  }

 private:
  Checkpointer checkpointer(AsyncMode mode) {
    Checkpointer result(world_, {}, {.folder = folder_, .async = mode, .num_threads = threads_});
    result.add("model", model_);
    result.add("optimizer", optimizer_);
    return result;
  }

  // Removes earlier checkpoints and waits until the disk is idle.
  void clear() {
    barrier();
    if (world_.rank() == 0) {
      for (const StepEntry& step : list_steps(folder_)) std::filesystem::remove_all(step.path);
      ::sync();
    }
    barrier();
  }
  void barrier() { mesh_.group()->barrier({"bench::barrier"}).wait(); }

  // Records the slowest rank's value; the first run is the warm-up, and only its memory counts.
  void add(const std::string& name, double value, int run) {
    value = mesh_.group()->max(value, {"bench::figure"});
    if (run >= 0 || name.ends_with("_mib")) figures_[name].push_back(value);
  }
  template <class Call>
  void timed(const std::string& name, int run, const Call& call) {
    barrier();
    const auto start = Clock::now();
    call();
    add(name, seconds_since(start), run);
  }

  void synchronous() {
    Checkpointer checkpointer = this->checkpointer(AsyncMode::Disabled);
    for (int run = -1; run < runs_; ++run) {
      clear();
      const ExtraMemory memory;
      timed("save_s", run, [&] { checkpointer.save(1); });
      add("save_extra_mib", memory.mib(), run);
      const auto step = step_path(folder_, 1);
      timed("load_warm_s", run, [&] { checkpointer.load(step); });
      drop_from_memory(step);
      timed("load_s", run, [&] { checkpointer.load(step); });
    }
  }

  void model_alone() {
    const std::vector<Parameter> parameters = model_.parameters();
    const auto folder = folder_ / "model_alone";
    for (int run = -1; run < runs_; ++run) {
      barrier();
      if (world_.rank() == 0) {
        std::filesystem::remove_all(folder);
        std::filesystem::create_directories(folder_);
        ::sync();
      }
      const ExtraMemory memory;
      timed("model_s", run, [&] { save_model(parameters, world_, folder); });
      add("model_extra_mib", memory.mib(), run);
    }
  }

  void asynchronous(AsyncMode mode, const std::string& name) {
    Checkpointer checkpointer = this->checkpointer(mode);
    for (int run = -1; run < runs_; ++run) {
      clear();
      // All ranks at once, because they also share the cores during the copy.
      const int64_t products_alone = products(compute_);
      barrier();
      const ExtraMemory memory;
      const auto start = Clock::now();
      checkpointer.save(1);
      double blocked = seconds_since(start);
      if (mode == AsyncMode::Staged) {
        add(name + "_called_s", blocked, run);
        const double lost = lost_seconds(products_alone, products(compute_));
        const auto waiting = Clock::now();
        checkpointer.wait_for_staging();
        blocked += lost + seconds_since(waiting);
        add(name + "_lost_s", lost, run);
      }
      add(name + "_blocked_s", blocked, run);
      checkpointer.finish();
      add(name + "_total_s", seconds_since(start), run);
      add(name + "_extra_mib", memory.mib(), run);
    }
  }

  // `parent`: folder of this rank's host. Each save is a generation next to the previous one, as in a run.
  void in_memory(const std::filesystem::path& parent, const std::string& name) {
    std::filesystem::create_directories(parent);
    const auto peers = std::make_shared<PeerFolder>(
        world_, PeerFolder::Options{.parent = parent, .job = "checkpoint_bench", .run = "checkpoint_bench"});
    Checkpointer checkpointer(world_, {},
                              {.async = AsyncMode::Copied, .num_threads = threads_, .peers = peers});
    checkpointer.add("model", model_);
    checkpointer.add("optimizer", optimizer_);
    for (int run = -1; run < runs_; ++run) {
      barrier();
      const auto start = Clock::now();
      checkpointer.save(run + 2);
      add(name + "_blocked_s", seconds_since(start), run);
      checkpointer.finish();
      add(name + "_total_s", seconds_since(start), run);
    }
    for (int run = -1; run < runs_; ++run) load_from(*peers, checkpointer, name + "_load_s", run);
    for (int run = -1; run < runs_ && peers->num_places() > 1; ++run) {
      if (world_.rank() == world_.size() - 1)
        for (const StepEntry& step : list_steps(peers->path())) std::filesystem::remove_all(step.path);
      load_from(*peers, checkpointer, name + "_lost_load_s", run);
    }
    peers->remove();
  }

  void load_from(PeerFolder& peers, Checkpointer& checkpointer, const std::string& figure, int run) {
    timed(figure, run, [&] {
      const auto newest = peers.choose_newest();
      TITAN_CHECK(newest, "no generation in ", peers.path().string());
      checkpointer.load(step_path(peers.path(), *newest),
                        {.bring_files = [&](const Manifest& manifest, const std::set<int64_t>& ranks) {
                          peers.bring_files(manifest, ranks);
                        }});
    });
  }

  void all_that_is_taken(AsyncMode mode, const std::string& name) {
    Checkpointer checkpointer = this->checkpointer(mode);
    for (int run = -1; run < runs_; ++run) {
      clear();
      const double per_second = static_cast<double>(products(span_ / 2)) / seconds(span_ / 2);
      barrier();
      const auto start = Clock::now();
      checkpointer.save(1);
      int64_t count = products(compute_);
      checkpointer.wait_for_staging();  // as an optimizer step would
      auto on_disk = std::async(std::launch::async, [&] { checkpointer.finish(); });
      const auto is_under_way = [&] { return on_disk.wait_for(0s) != std::future_status::ready; };
      while (Clock::now() - start < span_ || is_under_way()) count += products(compute_);
      add(name + "_taken_s", seconds_since(start) - static_cast<double>(count) / per_second, run);
      on_disk.get();
    }
  }

  // Computes matrix products on this thread, as a training step does, and returns how many fit into `time`.
  static int64_t products(Clock::duration time) {
    const at::Tensor factor = at::ones({256, 256});
    const auto start = Clock::now();
    int64_t count = 0;
    for (; Clock::now() - start < time; ++count) at::mm(factor, factor);
    return count;
  }
  double lost_seconds(int64_t alone, int64_t beside) const {
    const double share = static_cast<double>(beside) / static_cast<double>(std::max<int64_t>(1, alone));
    return seconds(compute_) * std::max(0.0, 1 - share);
  }

  void drop_from_memory(const std::filesystem::path& step) {
    for (const auto& entry : std::filesystem::directory_iterator(step)) {
      const int fd = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
      if (fd < 0) continue;
      ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
      ::close(fd);
    }
  }

  const dist::World& world_;
  const DeviceMesh mesh_;
  const std::filesystem::path folder_, memory_;
  const int runs_, threads_;
  const std::chrono::milliseconds compute_, span_;
  const std::string only_;
  Tensors model_, optimizer_;
  Figures figures_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse({argv + 1, argv + argc});
    at::set_num_threads(1);
    const dist::World world = dist::init({.device = "cpu"});
    Bench(world, options).run();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "checkpoint_bench: " << error.what() << std::endl;
    return 1;
  }
}
