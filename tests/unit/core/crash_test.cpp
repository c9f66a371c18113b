#include "titan/core/crash.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

namespace titan {
namespace {

void touch(uintptr_t address) { *reinterpret_cast<volatile int*>(address) = 1; }

void abort_with_note() {
  install_crash_handler();
  set_crash_note("a note about memory");
  std::abort();
}

TEST(CrashDeathTest, ReportsTheFaultTheNoteAndABacktrace) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        install_crash_handler();
        install_crash_handler();
        set_crash_note("was that a freed parameter?");
        touch(8);
      },
      testing::KilledBySignal(SIGSEGV),
      "fatal signal SIGSEGV .invalid memory access. at address 0x0000000000000008\n"
      ".titan. was that a freed parameter.\n[^\n]+\\[0x");
}

TEST(CrashDeathTest, ReportsFaultsOfOtherThreads) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        install_crash_handler();
        std::thread([] { touch(16); }).join();
      },
      testing::KilledBySignal(SIGSEGV), "at address 0x0000000000000010\n");
}

TEST(CrashDeathTest, OmitsTheNoteForAborts) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(abort_with_note(), testing::KilledBySignal(SIGABRT),
              "fatal signal SIGABRT .aborted.\n[^\\[]+\\[0x");
}

TEST(CrashDeathTest, OmitsTheNoteForOtherAddresses) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        install_crash_handler();
        set_crash_note("a note about memory");
        touch(uintptr_t{1} << 41);
      },
      testing::KilledBySignal(SIGSEGV), "at address 0x0000020000000000\n[^\n]+\\[0x");
}

TEST(CrashDeathTest, DeclinedHandlerReportsNothing) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        decline_crash_handler();
        install_crash_handler();
        touch(8);
      },
      testing::KilledBySignal(SIGSEGV), "^$");
}

TEST(CrashDeathTest, ReportsASentSignalOnceAndEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        install_crash_handler();
        raise(SIGBUS);
      },
      testing::KilledBySignal(SIGBUS), "fatal signal SIGBUS .*gone.\n[^\\[]+\\[0x");
}

}  // namespace
}  // namespace titan
