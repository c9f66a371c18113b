#include "core/pickle.h"

#include <gtest/gtest.h>

namespace titan {
namespace {

// Opcodes as pickletools.dis() lists them. e2e.memory_snapshot checks that Python reads them.
TEST(Pickle, WritesProtocolTwo) {
  PickleWriter pickle;
  pickle.begin_dict();
  pickle.text("sizes");
  pickle.begin_list();
  pickle.integer(-3);
  pickle.append();
  pickle.set_item();
  using std::string_literals::operator""s;
  EXPECT_EQ(pickle.finish(),
            "\x80\x02}X\5\0\0\0sizesr\0\0\0\0]J\xfd\xff\xff\xff"
            "as."s);
}

TEST(Pickle, LargeNumbersTakeEightBytes) {
  PickleWriter pickle;
  pickle.integer(int64_t{1} << 40);
  using std::string_literals::operator""s;
  EXPECT_EQ(pickle.finish(), "\x80\x02\x8a\x08\0\0\0\0\0\1\0\0."s);
}

TEST(Pickle, WritesRepeatedTextsOnce) {
  PickleWriter pickle;
  pickle.begin_list();
  for (int i = 0; i < 3; ++i) {
    pickle.text("frames");
    pickle.append();
  }
  using std::string_literals::operator""s;
  EXPECT_EQ(pickle.finish(), "\x80\x02]X\6\0\0\0framesr\0\0\0\0aj\0\0\0\0aj\0\0\0\0a."s);
}

}  // namespace
}  // namespace titan
