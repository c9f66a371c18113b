#include <gtest/gtest.h>

#include "observe/stream_rows.h"

namespace titan::train {
namespace {

std::string joined(const EditedText& text) {
  std::string all;
  for (const std::string_view piece : text.pieces) all += piece;
  return all;
}

// As Kineto writes a GPU's events.
constexpr const char* kTrace = R"(
  {
    "name": "thread_name", "ph": "M", "ts": 1.0, "pid": 0, "tid": 7,
    "args": { "name": "stream 7 " }
  },
  {
    "name": "thread_name", "ph": "M", "ts": 1.0, "pid": 0, "tid": 77,
    "args": { "name": "stream 77 " }
  },
  {
    "ph": "X", "cat": "user_annotation", "name": "stream: fsdp gather", "pid": 40, "tid": 40,
    "ts": 1.0, "dur": 2.0
  },
  {
    "ph": "X", "cat": "gpu_user_annotation", "name": "stream: fsdp gather", "pid": 0, "tid": 7,
    "ts": 1.0, "dur": 2.0
  })";

TEST(StreamRows, AMarkedStreamHasItsName) {
  const std::string named = joined(with_stream_names(kTrace));
  EXPECT_NE(named.find(R"("name": "stream 7 fsdp gather ")"), std::string::npos) << named;
  EXPECT_NE(named.find(R"("name": "stream 77 ")"), std::string::npos) << named;
  EXPECT_EQ(named.size(), std::string(kTrace).size() + std::string(" fsdp gather").size());
}

TEST(StreamRows, WithoutMarksTheTraceIsAsItWas) {
  const std::string trace = R"({"name": "stream 7 "})";
  EXPECT_EQ(joined(with_stream_names(trace)), trace);
  EXPECT_EQ(joined(with_stream_names("")), "");
}

}  // namespace
}  // namespace titan::train
