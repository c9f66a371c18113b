#include "cli/launch_signals.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

#include "cli/taken_signals.h"

namespace titan::cli {
namespace {

void wait_out_same_signal() { std::this_thread::sleep_for(kSameSignal + std::chrono::milliseconds(50)); }

TEST(SecondRequest, TheFirstLetsItsWorkEnd) {
  SignalReader signals;
  SecondRequest request(std::nullopt);
  EXPECT_FALSE(request.has_come(signals));
  wait_out_same_signal();
  raise(SIGTERM);
  EXPECT_FALSE(request.has_come(signals));
  raise(SIGINT);  // what comes with it is one with it
  EXPECT_FALSE(request.has_come(signals));
  wait_out_same_signal();
  raise(SIGUSR2);
  raise(SIGQUIT);
  EXPECT_FALSE(request.has_come(signals)) << "they don't ask for the end";
  raise(SIGTERM);
  EXPECT_TRUE(request.has_come(signals));
  EXPECT_TRUE(request.has_come(signals));
}

TEST(SecondRequest, OfAJobThatIsAskedTheNextIsTheSecond) {
  SignalReader signals;
  SecondRequest request(SecondRequest::Clock::now());
  raise(SIGINT);
  EXPECT_FALSE(request.has_come(signals)) << "within a second of the first";
  wait_out_same_signal();
  raise(SIGHUP);
  EXPECT_TRUE(request.has_come(signals));

  SecondRequest of_long_ago(SecondRequest::Clock::now() - 2 * kSameSignal);
  raise(SIGTERM);
  EXPECT_TRUE(of_long_ago.has_come(signals));
}

TEST(TakenSignals, ThoseThatHaveAHandlerOrAreReadFromADescriptor) {
  EXPECT_FALSE(takes(getpid(), SIGUSR2));
  {
    SignalReader signals;
    EXPECT_TRUE(takes(getpid(), SIGUSR2));
  }
  EXPECT_FALSE(takes(getpid(), SIGUSR2));
  const auto before = signal(SIGUSR2, [](int) {});
  EXPECT_TRUE(takes(getpid(), SIGUSR2));
  signal(SIGUSR2, SIG_IGN);
  EXPECT_FALSE(takes(getpid(), SIGUSR2)) << "nothing would come of it";
  signal(SIGUSR2, before);
  EXPECT_FALSE(takes(999'999'999, SIGUSR2)) << "there is no such process";
}

}  // namespace
}  // namespace titan::cli
