// Speed of writing, reading and verifying a rank's checkpoint file, compared with the disk's own speed.
//
//   rank_file_bench [--folder DIR] [--mib N] [--runs N] [--threads N] [--processes N]
//
// Each process has its own file in DIR (default: the temporary folder), with N MiB (default 800) of tensors
// like those of half a 134M Llama with AdamW's state. The disk's own speed is measured with the same number
// of bytes: large writes and one sync, into a growing file (plain) and into reserved space, the faster of
// which counts in each run; and large reads. Each run (default 5) measures everything once, one after
// another; reads begin with the file out of the page cache. Prints a JSON object of medians: GB/s over all
// processes, and the checksummed file's speed as a share of the disk's.

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "checkpoint/format/rank_file.h"
#include "titan/core/error.h"

namespace {

using namespace titan;
using namespace titan::checkpoint;
using Clock = std::chrono::steady_clock;

constexpr int64_t kMiB = 1 << 20;
constexpr size_t kDiskChunk = 8 << 20;
const FileIdentity kIdentity = {"0123456789abcdef0123456789abcdef", 1, 0, 1};

using Options = std::map<std::string, std::string>;

Options parse(const std::vector<std::string>& args) {
  Options options = {{"folder", std::filesystem::temp_directory_path().string()},
                     {"mib", "800"},
                     {"runs", "5"},
                     {"threads", "2"},
                     {"processes", "1"}};
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    TITAN_CHECK(args[i].starts_with("--") && options.contains(args[i].substr(2)), "unknown option ", args[i]);
    options[args[i].substr(2)] = args[i + 1];
  }
  TITAN_CHECK(args.size() % 2 == 0, args.back(), " needs a value");
  return options;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

at::Tensor numbers(int64_t rows, int64_t columns) {
  at::Tensor tensor = at::empty({rows, columns});
  auto* value = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) value[i] = static_cast<float>(i * 2654435761 % 1000003);
  return tensor;
}

// Tensors with the sizes of half an embedding and of half a layer's weights, `num_bytes` in total.
std::vector<PieceToWrite> state(int64_t num_bytes) {
  std::vector<PieceToWrite> pieces;
  const std::vector<std::pair<int64_t, int64_t>> layer = {{384, 768},  {384, 768},  {384, 768},
                                                          {384, 768},  {1, 384},    {1024, 768},
                                                          {1024, 768}, {384, 2048}, {1, 384}};
  for (int64_t made = 0; made < num_bytes;) {
    const auto [rows, columns] =
        pieces.size() < 6 ? std::pair<int64_t, int64_t>{16000, 768} : layer[pieces.size() % 9];
    at::Tensor data = numbers(rows, columns);
    made += static_cast<int64_t>(data.nbytes());
    pieces.push_back({str("tensor.", pieces.size()), {{0, 0}, {rows, columns}}, std::move(data)});
  }
  return pieces;
}

class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags)
      : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    TITAN_CHECK(fd_ >= 0, "cannot open ", path.string());
  }
  ~Descriptor() { ::close(fd_); }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Runs the commands in one process.
class Worker {
 public:
  Worker(std::filesystem::path path, const std::vector<PieceToWrite>& pieces, int threads)
      : path_(std::move(path)), pieces_(pieces), threads_(threads), bytes_(8 * kDiskChunk, '\0') {
    std::mt19937 random(1);
    for (char& byte : bytes_) byte = static_cast<char>(random());
  }
  ~Worker() { ::unlink(path_.c_str()); }

  void perform(char command) {
    switch (command) {
      case 'p':
        return prepare();
      case 'w':
        return write_plain(/*reserves=*/false);
      case 'f':
        return write_plain(/*reserves=*/true);
      case 's':
        written_ = write_rank_file(path_, kIdentity, pieces_, {.num_threads = threads_});
        return;
      case 'c':
        return make_cold();
      case 'r':
        return read_plain();
      case 'l':
        return load();
      default:
        return RankFile(path_, kIdentity, written_->record).verify();
    }
  }

 private:
  // Removes the previous file and waits until the disk is idle.
  void prepare() {
    ::unlink(path_.c_str());
    ::sync();
  }

  void write_plain(bool reserves) {
    const Descriptor file(path_, O_WRONLY | O_CREAT | O_EXCL);
    const int64_t num_bytes = rank_file_bytes(kIdentity, pieces_);
    // Without reservation on a file system that doesn't support it.
    if (reserves && ::fallocate(file.get(), 0, 0, num_bytes) != 0)
      TITAN_CHECK(errno == EOPNOTSUPP, "the disk's own reservation failed");
    for (int64_t done = 0; done < num_bytes;) {
      const auto size = std::min<int64_t>(static_cast<int64_t>(kDiskChunk), num_bytes - done);
      // From different places, because a tensor's bytes aren't in a cache either.
      const char* from = bytes_.data() + static_cast<size_t>(done / size % 8) * kDiskChunk;
      const ssize_t count = ::write(file.get(), from, static_cast<size_t>(size));
      TITAN_CHECK(count > 0, "the disk's own write failed");
      done += count;
    }
    TITAN_CHECK(::fdatasync(file.get()) == 0, "the disk's own sync failed");
  }

  void make_cold() {
    const Descriptor file(path_, O_RDONLY);
    ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
  }

  void read_plain() {
    const Descriptor file(path_, O_RDONLY);
    ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
    while (true) {
      const ssize_t count = ::read(file.get(), bytes_.data(), kDiskChunk);
      TITAN_CHECK(count >= 0, "the disk's own read failed");
      if (count == 0) return;
    }
  }

  void load() {
    if (loaded_.empty())
      for (const PieceToWrite& piece : pieces_) loaded_.push_back(at::zeros_like(piece.data));
    const RankFile file(path_, kIdentity, written_->record);
    for (size_t i = 0; i < pieces_.size(); ++i) file.read(pieces_[i].name, pieces_[i].box, loaded_[i]);
  }

  const std::filesystem::path path_;
  const std::vector<PieceToWrite>& pieces_;
  const int threads_;
  std::string bytes_;
  std::optional<WrittenFile> written_;
  std::vector<at::Tensor> loaded_;
};

// Processes that are started once and wait for commands, so their start isn't measured.
class Workers {
 public:
  Workers(int count, const std::function<void(int index, int commands, int answers)>& serve) {
    int answers[2];
    TITAN_CHECK(::pipe(answers) == 0, "cannot create a pipe");
    answers_ = answers[0];
    for (int i = 0; i < count; ++i) {
      int commands[2];
      TITAN_CHECK(::pipe(commands) == 0, "cannot create a pipe");
      const pid_t process = ::fork();
      TITAN_CHECK(process >= 0, "cannot start a process");
      if (process == 0) {
        ::close(commands[1]);
        for (int other : commands_) ::close(other);
        serve(i, commands[0], answers[1]);
        ::_exit(0);
      }
      ::close(commands[0]);
      commands_.push_back(commands[1]);
      processes_.push_back(process);
    }
    ::close(answers[1]);
  }
  ~Workers() {
    for (int commands : commands_) ::close(commands);
    for (pid_t process : processes_) ::waitpid(process, nullptr, 0);
    ::close(answers_);
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Seconds until all processes have run the command.
  double perform(char command) {
    const auto start = Clock::now();
    for (int commands : commands_) TITAN_CHECK(::write(commands, &command, 1) == 1, "a process is gone");
    char answer = 0;
    for (size_t i = 0; i < processes_.size(); ++i)
      TITAN_CHECK(::read(answers_, &answer, 1) == 1, "a process failed");
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

 private:
  std::vector<int> commands_;
  std::vector<pid_t> processes_;
  int answers_ = -1;
};

int run(const Options& options) {
  at::set_num_threads(1);  // so that no thread exists before the fork
  const int processes = std::stoi(options.at("processes")), threads = std::stoi(options.at("threads"));
  const auto pieces = state(std::stoll(options.at("mib")) * kMiB);
  Workers workers(processes, [&](int index, int commands, int answers) {
    try {
      const auto path = std::filesystem::path(options.at("folder")) /
                        str("rank_file_bench.", ::getpid(), ".", index, ".safetensors");
      Worker worker(path, pieces, threads);
      for (char command = 0; ::read(commands, &command, 1) == 1;) {
        worker.perform(command);
        if (::write(answers, &command, 1) != 1) return;
      }
    } catch (const std::exception& error) {
      std::cerr << "rank_file_bench: " << error.what() << std::endl;
    }
  });
  const double gigabytes = static_cast<double>(processes * rank_file_bytes(kIdentity, pieces)) * 1e-9;
  const auto speed = [&](char preparation, char command) {
    workers.perform(preparation);
    return gigabytes / workers.perform(command);
  };
  std::map<std::string, std::vector<double>> figures;
  for (int run = -1; run < std::stoi(options.at("runs")); ++run) {
    const double plain = speed('p', 'w'), reserved = speed('p', 'f'), save = speed('p', 's');
    const double disk_write = std::max(plain, reserved);
    const double disk_read = speed('c', 'r'), load = speed('c', 'l'), verify = speed('c', 'v');
    if (run < 0) continue;  // warm-up
    figures["disk_plain_write_gb_s"].push_back(plain);
    figures["disk_reserved_write_gb_s"].push_back(reserved);
    figures["disk_write_gb_s"].push_back(disk_write);
    figures["save_gb_s"].push_back(save);
    figures["save_share"].push_back(save / disk_write);
    figures["disk_read_gb_s"].push_back(disk_read);
    figures["load_gb_s"].push_back(load);
    figures["load_share"].push_back(load / disk_read);
    figures["verify_gb_s"].push_back(verify);
    figures["verify_share"].push_back(verify / disk_read);
  }
  std::cout << "{\"processes\": " << processes << ", \"threads\": " << threads
            << ", \"gigabytes\": " << gigabytes;
  for (const auto& [name, values] : figures) std::cout << ", \"" << name << "\": " << median(values);
  std::cout << "}" << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse({argv + 1, argv + argc}));
  } catch (const std::exception& error) {
    std::cerr << "rank_file_bench: " << error.what() << std::endl;
    return 1;
  }
}
