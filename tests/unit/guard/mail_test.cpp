// What ranks tell each other through a store, two of them in one process.

#include <gmock/gmock.h>
#include <atomic>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "guard/mail.h"

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

struct MailRank {
  std::shared_ptr<Bell> bell = std::make_shared<Bell>();
  std::shared_ptr<WatchdogMail> mail;

  MailRank(WatchdogMail::Connect connect, int rank, std::chrono::milliseconds interval)
      : mail(std::make_shared<WatchdogMail>(std::move(connect), bell, rank, 2)) {
    mail->set_interval(interval);
    mail->post({.number = 1, .what = "step"});
    mail->start();
  }
  ~MailRank() { mail->stop({}); }
};

template <class Condition>
bool comes(Condition condition, std::chrono::seconds limit = 60s) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// All ranks have to come to their end together, however seldom they tell what they are at.
TEST(WatchdogMail, AVerdictIsHeardLongBeforeTheNextBeat) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto connect = [store] { return store; };
  MailRank first(connect, 0, 600s), second(connect, 1, 600s);
  ASSERT_TRUE(comes([&] { return second.mail->is_connected(); }));
  first.mail->condemn({.text = "rank 1 hangs", .culprits = {1}});
  EXPECT_TRUE(second.bell->wait(60s));
  ASSERT_TRUE(second.mail->verdict());
  EXPECT_EQ(second.mail->verdict()->text, "rank 1 hangs");
  EXPECT_TRUE(first.bell->wait(60s));
}

TEST(WatchdogMail, ABrokenConnectionIsMadeAgain) {
  const auto server = c10::make_intrusive<c10d::HashStore>();
  const auto is_cut = std::make_shared<std::atomic<bool>>(false);
  std::atomic<int> num_connections{0};
  // The second try finds nobody, as where a host comes back slowly.
  const auto connect = [&]() -> c10::intrusive_ptr<c10d::Store> {
    if (++num_connections == 2) return {};
    return c10::make_intrusive<CutStore>(
        server, num_connections == 1 ? is_cut : std::make_shared<std::atomic<bool>>(false));
  };
  MailRank first([server] { return server; }, 0, 10ms), second(connect, 1, 10ms);
  const auto heard = [&](int64_t number) {
    const auto beat = first.mail->beats()[1];
    return beat && beat->number >= number;
  };
  ASSERT_TRUE(comes([&] { return heard(1); }));
  *is_cut = true;
  ASSERT_TRUE(comes([&] { return !second.mail->is_connected(); }));
  second.mail->post({.number = 2, .what = "step"});
  EXPECT_TRUE(comes([&] { return heard(2); }));
  EXPECT_TRUE(comes([&] { return second.mail->is_connected(); }));
  EXPECT_EQ(num_connections, 3);
}

// Another program's, of which nothing can be read, isn't a connection that broke.
TEST(WatchdogMail, ABeatThatCantBeReadIsLeftOut) {
  const auto server = c10::make_intrusive<c10d::HashStore>();
  int num_connections = 0;
  MailRank first(
      [&] {
        ++num_connections;
        return server;
      },
      0, 10ms);
  server->set("beat/1", std::vector<uint8_t>{'h', 'i'});
  ASSERT_TRUE(comes([&] { return first.mail->beats()[0].has_value(); }));
  std::this_thread::sleep_for(50ms);
  server->set("beat/1", [] {
    const std::string text = to_text(Beat{.number = 7, .what = "step"});
    return std::vector<uint8_t>(text.begin(), text.end());
  }());
  EXPECT_TRUE(comes([&] { return first.mail->beats()[1].has_value(); }));
  EXPECT_EQ(num_connections, 1);
}

}  // namespace
}  // namespace titan::dist
