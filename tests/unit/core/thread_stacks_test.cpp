#include "core/threads.h"

#include <gmock/gmock.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace titan {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// Threads that each call a function and then wait until this object is destroyed.
class Waiting {
 public:
  ~Waiting() {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  template <class First>
  void add(const char* name, First first) {
    const int before = num_waiting_;
    threads_.emplace_back([this, name, first] {
      pthread_setname_np(pthread_self(), name);
      first();
      std::unique_lock lock(mutex_);
      ++num_waiting_;
      changed_.wait(lock, [this] { return ended_; });
    });
    while (num_waiting_ == before) std::this_thread::yield();
    const std::lock_guard lock(mutex_);  // the thread holds it until it waits
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::atomic<int> num_waiting_{0};
  std::vector<std::thread> threads_;
};

const ThreadStack* find(const std::vector<ThreadStack>& stacks, const std::string& name) {
  for (const ThreadStack& stack : stacks)
    if (stack.name == name) return &stack;
  return nullptr;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

TEST(ThreadStacks, ShowWhereOtherThreadsAre) {
  Waiting waiting;
  waiting.add("waits", [] {});
  const auto stacks = thread_stacks();
  EXPECT_EQ(stacks.front().tid, getpid()) << "the first thread comes first";
  EXPECT_THAT(joined(stacks.front().frames), HasSubstr("titan::thread_stacks"));
  const ThreadStack* other = find(stacks, "waits");
  ASSERT_TRUE(other);
  EXPECT_THAT(joined(other->frames), HasSubstr("pthread_cond_wait"));
  EXPECT_THAT(joined(other->frames), Not(HasSubstr("titan::thread_stacks")));
}

TEST(ThreadStacks, InterruptThreadsInSystemCalls) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::atomic<bool> reading{false};
  ssize_t num_read = -1;
  std::thread reader([&] {
    pthread_setname_np(pthread_self(), "reads");
    char byte = 0;
    reading = true;
    num_read = read(ends[0], &byte, 1);
  });
  while (!reading) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto stacks = thread_stacks();
  const ThreadStack* other = find(stacks, "reads");
  ASSERT_TRUE(other);
  EXPECT_THAT(joined(other->frames), HasSubstr("read"));
  EXPECT_EQ(write(ends[1], "x", 1), 1);
  reader.join();
  EXPECT_EQ(num_read, 1) << "the interrupted call continues";
  close(ends[0]);
  close(ends[1]);
}

TEST(ThreadStacks, ReportThreadsThatBlockTheSignal) {
  Waiting waiting;
  waiting.add("deaf", [] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
  });
  const auto start = std::chrono::steady_clock::now();
  const auto stacks = thread_stacks(std::chrono::seconds(5));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(4));
  const ThreadStack* deaf = find(stacks, "deaf");
  ASSERT_TRUE(deaf);
  EXPECT_TRUE(deaf->frames.empty());
  EXPECT_THAT(deaf->state, HasSubstr("sleeping"));
  EXPECT_THAT(to_text({*deaf}), HasSubstr("it blocks the signal"));
}

TEST(ThreadStacks, ShowEqualStacksOnce) {
  const std::string text = to_text({{1, "a", "running", {"main"}},
                                    {2, "b", "sleeping", {"wait", "run"}},
                                    {3, "c", "sleeping", {"wait", "run"}}});
  EXPECT_EQ(
      text,
      "thread 1 (a), running\n  #0 main\n2 threads, each sleeping: 2 (b), 3 (c)\n  #0 wait\n  #1 run\n");
}

}  // namespace
}  // namespace titan
