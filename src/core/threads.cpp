#include "core/threads.h"

#include <cxxabi.h>
#include <dirent.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "core/process.h"
#include "titan/core/error.h"

namespace titan {

void run_tasks(int num_threads, size_t count, const std::function<void(size_t)>& task) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    for (size_t index = next++; index < count; index = next++) {
      try {
        task(index);
      } catch (...) {
        next = count;
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    const size_t num_used = std::min(static_cast<size_t>(std::max(num_threads, 1)), count);
    {
      SignalsBlocked blocked;
      for (size_t i = 1; i < num_used; ++i) threads.emplace_back(work);
    }
    work();
  }
  if (error) std::rethrow_exception(error);
}

bool within(std::chrono::milliseconds limit, std::function<void()> call) {
  const auto promise = std::make_shared<std::promise<void>>();
  std::future<void> done = promise->get_future();
  const auto run = [promise, call = std::move(call)]() mutable {
    std::exception_ptr error;
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
    call = nullptr;  // releases what it holds (a group) before the caller learns that it is done
    error ? promise->set_exception(error) : promise->set_value();
  };
  {
    SignalsBlocked blocked;
    std::thread(run).detach();
  }
  if (done.wait_for(limit) != std::future_status::ready) return false;
  done.get();
  return true;
}

struct SideThread::State {
  Task tick;
  std::chrono::milliseconds period;

  std::mutex mutex;
  std::condition_variable changed;
  Task posted;
  bool works = false, stops = false;

  bool is_done() const { return !posted && !works; }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait_for(lock, period, [this] { return stops || posted; });
      if (posted)
        work(lock, std::exchange(posted, nullptr));
      else if (stops)
        return;
      else if (tick)
        work(lock, tick);
    }
  }

  void work(std::unique_lock<std::mutex>& lock, Task task) {
    works = true;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    works = false;
    changed.notify_all();
  }
};

SideThread::SideThread(const char* name, Task tick, std::chrono::milliseconds period)
    : state_(std::make_shared<State>()) {
  state_->tick = std::move(tick);
  state_->period = period;
  std::thread([state = state_, name] {
    pthread_setname_np(pthread_self(), name);
    state->run();
  }).detach();
}

SideThread::~SideThread() {
  std::unique_lock lock(state_->mutex);
  state_->stops = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::seconds(1), [this] { return state_->is_done(); });
}

void SideThread::post(Task task) {
  const std::lock_guard lock(state_->mutex);
  state_->posted = std::move(task);
  state_->changed.notify_all();
}

bool SideThread::wait(std::chrono::milliseconds limit) const {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, limit, [this] { return state_->is_done(); });
}

// [Note: asking a thread]
// There is one request at a time. The asked thread receives a signal, finds its id in the request, and writes
// its stack with backtrace(), which is safe in a handler once libgcc is loaded (an old libgcc takes the
// loader's lock). Symbol names are looked up outside the handler. A thread that answers too late finds the
// request withdrawn. If a thread hangs while it writes, it keeps that request, and the next one is a new
// object.

namespace {

constexpr int kMaxStackFrames = 64;

enum RequestState { kIdle, kAsked, kWriting, kWritten };

struct Request {
  std::atomic<int> state{kIdle};
  std::atomic<int> tid{0};
  void* frames[kMaxStackFrames];
  int num_frames = 0;
};
Request first_request;
std::atomic<Request*> request{&first_request};

int stack_signal() { return SIGRTMIN + 3; }

int current_tid() { return static_cast<int>(syscall(SYS_gettid)); }

void answer(int /*signal*/) {
  const int error = errno;
  int asked = kAsked;
  Request& mine = *request.load();
  if (mine.tid.load() == current_tid() && mine.state.compare_exchange_strong(asked, kWriting)) {
    mine.num_frames = backtrace(mine.frames, kMaxStackFrames);
    mine.state.store(kWritten);
  }
  errno = error;
}

using Addresses = std::vector<void*>;

Addresses taken(const Request& answered, int num_skipped) {
  return Addresses(answered.frames + std::min(num_skipped, answered.num_frames),
                   answered.frames + answered.num_frames);
}

// Waits up to twice `limit` if the thread is writing its answer, which takes microseconds.
bool wait_for_answer(Request& asked, std::chrono::milliseconds limit) {
  const auto start = std::chrono::steady_clock::now();
  while (asked.state.load() != kWritten) {
    const auto waited = std::chrono::steady_clock::now() - start;
    int expected = kAsked;
    if (waited >= limit && asked.state.compare_exchange_strong(expected, kIdle)) return false;
    if (waited >= 2 * limit) {
      request.store(new Request);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

Addresses ask(int tid, std::chrono::milliseconds limit) {
  Request& asked = *request.load();
  asked.tid.store(tid);
  asked.state.store(kAsked);
  if (syscall(SYS_tgkill, getpid(), tid, stack_signal()) != 0) {
    asked.state.store(kIdle);
    return {};  // the thread has ended
  }
  if (!wait_for_answer(asked, limit)) return {};
  asked.state.store(kIdle);
  return taken(asked, /*num_skipped=*/2);  // the handler and its trampoline
}

// --- /proc

std::string first_line(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path) >> std::ws, line);
  return line;
}

std::string task_file(int tid, const char* name) { return str("/proc/self/task/", tid, "/", name); }

bool blocks_signal(int tid) {
  const std::string mask = status_field(str("self/task/", tid), "SigBlk");
  if (mask.empty()) return false;
  return (std::strtoull(mask.c_str(), nullptr, 16) >> (stack_signal() - 1) & 1) != 0;
}

std::string state_of(int tid) {
  const std::string state = status_field(str("self/task/", tid), "State");
  if (state.starts_with("R")) return "running";
  const std::string place = first_line(task_file(tid, "wchan"));
  const std::string where = place.empty() || place == "0" ? "" : " in " + place;
  if (state.starts_with("D")) return "in an uninterruptible wait" + where;
  return state.starts_with("S") ? "sleeping" + where : state;
}

std::vector<int> tids() {
  std::vector<int> all;
  DIR* folder = opendir("/proc/self/task");
  if (!folder) return all;
  while (const dirent* entry = readdir(folder))
    if (const int tid = std::atoi(entry->d_name)) all.push_back(tid);
  closedir(folder);
  std::sort(all.begin(), all.end());
  return all;
}

// --- names

std::string demangled(const char* symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &status), &std::free);
  std::string text = name ? name.get() : symbol;
  constexpr size_t kMost = 200;  // templates of LibTorch fill screens
  if (text.size() > kMost) text = text.substr(0, kMost - 3) + "...";
  return text;
}

// Without a symbol name, gives the offset in the file, which addr2line takes.
std::string describe(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || !info.dli_fname) return str(address);
  const char* slash = std::strrchr(info.dli_fname, '/');
  const std::string file = slash ? slash + 1 : info.dli_fname;
  const auto* base = static_cast<const char*>(info.dli_sname ? info.dli_saddr : info.dli_fbase);
  std::ostringstream text;
  if (info.dli_sname) text << demangled(info.dli_sname) << " in ";
  text << file << " +0x" << std::hex << static_cast<const char*>(address) - base;
  return text.str();
}

Addresses own_stack() {
  Addresses frames(kMaxStackFrames);
  frames.resize(static_cast<size_t>(backtrace(frames.data(), kMaxStackFrames)));
  return frames;
}

}  // namespace

void prepare_thread_stacks() {
  static std::once_flag once;
  std::call_once(once, [] {
    own_stack();
    struct sigaction action = {};
    action.sa_handler = answer;
    action.sa_flags = SA_RESTART;
    sigaction(stack_signal(), &action, nullptr);
  });
}

std::vector<ThreadStack> thread_stacks(std::chrono::milliseconds limit) {
  prepare_thread_stacks();
  const int self = current_tid();
  std::vector<ThreadStack> stacks;
  // Looked up once: glibc searches all symbols of a library for a name, LibTorch has hundreds of thousands,
  // and most threads of a pool wait in the same place.
  std::map<void*, std::string> known_names;
  const auto names_of = [&](const Addresses& addresses) {
    std::vector<std::string> names;
    for (void* address : addresses) {
      const auto [known, is_new] = known_names.try_emplace(address);
      if (is_new) known->second = describe(address);
      names.push_back(known->second);
    }
    return names;
  };
  for (const int tid : tids()) {
    ThreadStack stack{tid, first_line(task_file(tid, "comm")), state_of(tid), {}};
    if (tid == self)
      stack.frames = names_of(own_stack());
    else if (!blocks_signal(tid))
      stack.frames = names_of(ask(tid, limit));
    stacks.push_back(std::move(stack));
  }
  return stacks;
}

std::string to_text(const std::vector<ThreadStack>& stacks) {
  std::vector<std::pair<std::string, std::vector<const ThreadStack*>>> groups;  // in order of appearance
  std::map<std::string, size_t> places;
  for (const ThreadStack& stack : stacks) {
    std::string frames;
    for (size_t i = 0; i < stack.frames.size(); ++i) frames += str("  #", i, " ", stack.frames[i], "\n");
    if (frames.empty()) frames = "  (it blocks the signal, so its stack is unknown)\n";
    const auto [place, is_new] = places.emplace(frames, groups.size());
    if (is_new) groups.push_back({frames, {}});
    groups[place->second].second.push_back(&stack);
  }
  std::string text;
  for (const auto& [frames, threads] : groups) {
    const std::string names = list_str(
        threads, ", ", [](const ThreadStack* thread) { return str(thread->tid, " (", thread->name, ")"); });
    text += str(
        threads.size() > 1 ? str(threads.size(), " threads, each ") : "thread ",
        threads.size() > 1 ? threads.front()->state + ": " + names : names + ", " + threads.front()->state,
        "\n", frames);
  }
  return text;
}

}  // namespace titan
