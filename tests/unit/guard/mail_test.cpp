// Messages of two ranks through a store, both in one process.

#include <gmock/gmock.h>
#include <atomic>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "guard/mail.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

using namespace std::chrono_literals;

/// A connection to `server` that can be cut.
class CutStore : public c10d::Store {
 public:
  CutStore(c10::intrusive_ptr<c10d::Store> server, std::shared_ptr<std::atomic<bool>> is_cut)
      : server_(std::move(server)), is_cut_(std::move(is_cut)) {}
  c10::intrusive_ptr<Store> clone() override { return server_->clone(); }
  void set(const std::string& key, const std::vector<uint8_t>& value) override { server().set(key, value); }
  std::vector<uint8_t> get(const std::string& key) override { return server().get(key); }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& wanted) override {
    return server().compareSet(key, expected, wanted);
  }
  int64_t add(const std::string& key, int64_t value) override { return server().add(key, value); }
  bool deleteKey(const std::string& key) override { return server().deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return server().check(keys); }
  int64_t getNumKeys() override { return server().getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { server().wait(keys); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& limit) override {
    server().wait(keys, limit);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    return server().multiGet(keys);
  }

 private:
  c10d::Store& server() {
    if (*is_cut_) throw Error("connection reset by peer");
    return *server_;
  }
  c10::intrusive_ptr<c10d::Store> server_;
  std::shared_ptr<std::atomic<bool>> is_cut_;
};

Mail::Outbox beat_number(int64_t number) {
  return {.beat = {.number = number, .what = "step"}, .verdict = {}, .record_request = ""};
}

// All ranks have to end together, however rarely they send beats.
TEST(Mail, AVerdictArrivesWithoutABeat) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto connect = [store] { return store; };
  Mail first(connect, 0, 2), second(connect, 1, 2);
  second.exchange(beat_number(1), /*everything=*/true);
  Mail::Outbox outbox = beat_number(1);
  outbox.verdict = Verdict{.text = "rank 1 hangs", .culprits = {1}};
  first.exchange(outbox, /*everything=*/true);
  const Mail::Inbox& inbox = second.exchange(beat_number(2), /*everything=*/false);
  ASSERT_TRUE(inbox.verdict);
  EXPECT_EQ(inbox.verdict->text, "rank 1 hangs");
  EXPECT_EQ(first.exchange(beat_number(2), true).beats[1]->number, 1) << "no beat was sent";
}

TEST(Mail, TheFirstVerdictHolds) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Mail first([store] { return store; }, 0, 2), second([store] { return store; }, 1, 2);
  Mail::Outbox outbox = beat_number(1);
  outbox.verdict = Verdict{.text = "rank 1 hangs"};
  first.exchange(outbox, true);
  outbox.verdict = Verdict{.text = "rank 0 hangs"};
  EXPECT_EQ(second.exchange(outbox, true).verdict->text, "rank 1 hangs");
}

TEST(Mail, ReconnectsAfterABrokenConnection) {
  const auto server = c10::make_intrusive<c10d::HashStore>();
  const auto is_cut = std::make_shared<std::atomic<bool>>(false);
  int num_connections = 0;
  // The second try finds nobody, as when a host comes back slowly.
  const auto connect = [&]() -> StorePtr {
    if (++num_connections == 2) return {};
    return c10::make_intrusive<CutStore>(
        server, num_connections == 1 ? is_cut : std::make_shared<std::atomic<bool>>(false));
  };
  Mail first([server] { return server; }, 0, 2), second(connect, 1, 2);
  EXPECT_TRUE(second.exchange(beat_number(1), true).is_connected);
  EXPECT_EQ(first.exchange(beat_number(1), true).beats[1]->number, 1);
  *is_cut = true;
  EXPECT_FALSE(second.exchange(beat_number(2), true).is_connected);
  const auto end = std::chrono::steady_clock::now() + 60s;
  while (!second.exchange(beat_number(2), true).is_connected && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(10ms);
  EXPECT_EQ(first.exchange(beat_number(2), true).beats[1]->number, 2);
  EXPECT_EQ(num_connections, 3);
}

// A beat of another program isn't a broken connection.
TEST(Mail, IgnoresABeatThatCannotBeParsed) {
  const StorePtr server = c10::make_intrusive<c10d::HashStore>();
  int num_connections = 0;
  Mail first(
      [&] {
        ++num_connections;
        return server;
      },
      0, 2);
  server->set("beat/1", "hi");
  const Mail::Inbox& inbox = first.exchange(beat_number(1), true);
  EXPECT_TRUE(inbox.beats[0]);
  EXPECT_FALSE(inbox.beats[1]);
  server->set("beat/1", to_text(Beat{.number = 7, .what = "step"}));
  EXPECT_TRUE(first.exchange(beat_number(2), true).beats[1]);
  EXPECT_EQ(num_connections, 1);
}

TEST(Mail, CarriesARequestForRecords) {
  const auto server = c10::make_intrusive<c10d::HashStore>();
  Mail first([server] { return server; }, 0, 2), second([server] { return server; }, 1, 2);
  Mail::Outbox outbox = beat_number(1);
  outbox.record_request = "request";
  EXPECT_EQ(first.exchange(outbox, true).record_request, "request");
  EXPECT_EQ(second.exchange(beat_number(1), true).record_request, "request");
  EXPECT_EQ(second.exchange(beat_number(2), true).num_record_requests, 1);
}

}  // namespace
}  // namespace titan::dist
