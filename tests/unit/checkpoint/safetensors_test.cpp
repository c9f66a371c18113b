#include "titan/checkpoint/safetensors.h"

#include <cstring>
#include <fstream>
#include <random>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"
#include "unit/checkpoint/temp_folder.h"

namespace titan {
namespace {

using testing::TempFolder;

const std::vector<at::ScalarType> kAllDtypes = {
    at::kDouble, at::kFloat, at::kHalf,  at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2,
    at::kLong,   at::kInt,   at::kShort, at::kChar,     at::kByte,          at::kBool};

void write_raw(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string read_raw(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string file_bytes(const std::string& header, size_t data_bytes) {
  uint64_t length = header.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header + std::string(data_bytes, 'x');
}

// The reader's complaint about a file with this header and this many bytes of data; "" when it accepts it.
std::string complaint(const std::string& header, size_t data_bytes) {
  TempFolder folder;
  write_raw(folder / "f.safetensors", file_bytes(header, data_bytes));
  try {
    SafetensorsFile file(folder / "f.safetensors");
    for (const auto& name : file.names()) file.tensor(name).clone();
    return "";
  } catch (const Error& error) {
    std::string message = error.what();
    EXPECT_NE(message.find("f.safetensors"), std::string::npos) << message;
    return message;
  }
}

#define EXPECT_REFUSED(header, data_bytes, words)                               \
  do {                                                                          \
    std::string message = complaint(header, data_bytes);                        \
    EXPECT_NE(message.find(words), std::string::npos) << "'" << message << "'"; \
  } while (0)

at::Tensor sample(at::ScalarType dtype, at::IntArrayRef shape) {
  at::Tensor values = at::randn(shape) * 10;
  return dtype == at::kBool ? values > 0 : values.to(dtype);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (a.numel() == 0) return true;
  at::Tensor x = a.contiguous(), y = b.contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

TEST(Safetensors, RoundTripsEveryDtypeBitForBit) {
  TempFolder folder;
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (auto dtype : kAllDtypes) tensors.emplace_back(str("t.", c10::toString(dtype)), sample(dtype, {3, 5}));
  tensors.emplace_back("scalar", at::scalar_tensor(2.5));
  tensors.emplace_back("empty", at::empty({4, 0}));
  tensors.emplace_back("transposed", at::randn({4, 6}).t());
  save_safetensors(folder / "a.safetensors", tensors, {{"format", "pt"}, {"note", "quote \" and \xc3\xa9"}});

  SafetensorsFile file(folder / "a.safetensors");
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("note"), "quote \" and \xc3\xa9");
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(same_bits(file.tensor(name), tensor)) << name;
    EXPECT_EQ(file.info(name).dtype, tensor.scalar_type());
    EXPECT_EQ(file.info(name).shape, tensor.sizes().vec());
  }
}

TEST(Safetensors, HeaderIsPaddedAndTensorsAreAligned) {
  TempFolder folder;
  save_safetensors(
      folder / "a.safetensors",
      {{"z", at::ones({3}, at::kByte)}, {"a", at::ones({1}, at::kHalf)}, {"m", at::ones({2}, at::kDouble)}});
  SafetensorsFile file(folder / "a.safetensors");
  EXPECT_EQ(file.names(), (std::vector<std::string>{"m", "a", "z"}));
  for (const auto& name : file.names()) {
    EXPECT_EQ(file.info(name).offset % static_cast<int64_t>(c10::elementSize(file.info(name).dtype)), 0);
  }
  EXPECT_EQ(file.info("m").offset % 8, 0);
}

TEST(Safetensors, ViewsKeepTheMapAlive) {
  TempFolder folder;
  save_safetensors(folder / "a.safetensors", {{"w", at::arange(10, at::kFloat)}});
  at::Tensor view = SafetensorsFile(folder / "a.safetensors").tensor("w");
  EXPECT_TRUE(at::equal(view, at::arange(10, at::kFloat)));
}

TEST(Safetensors, ReadsSlices) {
  TempFolder folder;
  at::Tensor whole = at::randn({7, 5, 3});
  save_safetensors(folder / "a.safetensors", {{"w", whole}, {"s", at::scalar_tensor(3.0)}});
  SafetensorsFile file(folder / "a.safetensors");
  auto slice = file.read_slice("w", {{2, 1, 0}, {3, 4, 2}});
  EXPECT_TRUE(slice.is_contiguous());
  EXPECT_TRUE(same_bits(slice, whole.narrow(0, 2, 3).narrow(1, 1, 4).narrow(2, 0, 2)));
  EXPECT_EQ(file.read_slice("w", {{7, 0, 0}, {0, 5, 3}}).numel(), 0);
  EXPECT_EQ(file.read_slice("s", {{}, {}}).item<double>(), 3.0);
  EXPECT_THROW(file.read_slice("w", {{5, 0, 0}, {3, 5, 3}}), Error);
  EXPECT_THROW(file.read_slice("w", {{-1, 0, 0}, {1, 5, 3}}), Error);
  EXPECT_THROW(file.read_slice("w", {{0, 0}, {1, 1}}), Error);
  const Box box{{2, 1, 0}, {3, 4, 2}};
  const at::Tensor target = at::zeros(box.length, slice.options());
  file.read_slice("w", box, target);
  EXPECT_TRUE(at::equal(target, slice));
  EXPECT_THROW(file.read_slice("w", box, target.to(at::kLong)), Error);
  EXPECT_THROW(file.read_slice("w", box, at::zeros({2, 4, 3}, slice.options()).transpose(0, 2)), Error);
  EXPECT_THROW(file.read_slice("w", box, at::zeros({3, 4, 3}, slice.options())), Error);
}

TEST(Safetensors, ReadsUnalignedTensors) {
  TempFolder folder;
  std::string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})";
  std::string bytes = file_bytes(header, 9);
  float values[2] = {1.5f, -2.0f};
  std::memcpy(bytes.data() + bytes.size() - 8, values, 8);
  write_raw(folder / "u.safetensors", bytes);
  at::Tensor tensor = SafetensorsFile(folder / "u.safetensors").tensor("f");
  EXPECT_TRUE(at::equal(tensor, at::tensor({1.5f, -2.0f})));
}

void flip_a_bit(const std::filesystem::path& path, int64_t offset) {
  std::string bytes = read_raw(path);
  bytes[static_cast<size_t>(offset)] ^= 4;
  write_raw(path, bytes);
}

TEST(Safetensors, FindsDamageBeforeItIsUsed) {
  TempFolder folder;
  const auto path = folder / "a.safetensors";
  constexpr int64_t kRows = 3 << 10, kBlockRows = 1 << 10;  // a row has 1 KiB
  save_safetensors(path, {{"w", at::randn({kRows, 256})}, {"v", at::randn({5})}});
  const int64_t start = SafetensorsFile(path).info("w").offset;
  flip_a_bit(path, start + (1 << 20) + 7);
  const SafetensorsFile file(path);
  EXPECT_EQ(file.read_slice("w", {{0, 0}, {kBlockRows, 256}}).numel(), 1 << 18);
  EXPECT_EQ(file.read_slice("w", {{2 * kBlockRows, 3}, {kBlockRows, 2}}).numel(), 2 * kBlockRows);
  EXPECT_EQ(file.tensor("v").numel(), 5);
  for (const Box& box :
       {Box{{kBlockRows - 1, 255}, {2, 1}}, Box{{kBlockRows, 0}, {1, 1}}, Box{{0, 0}, {kRows, 1}}}) {
    try {
      file.read_slice("w", box);
      ADD_FAILURE() << "the damage wasn't found";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("tensor 'w' is damaged: block 1 of 3"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_THROW(file.tensor("w"), ConfigError);
}

TEST(Safetensors, RefusesMalformedChecksums) {
  const std::string tensor = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  const auto with = [&](const std::string& metadata) {
    return "{\"__metadata__\":{" + metadata + "}," + tensor;
  };
  const std::string known = R"("titan_checksums":"1")";
  EXPECT_EQ(complaint(with(R"("a":"0:1 xxh3:no checksum")"), 1), "");
  EXPECT_REFUSED(with(R"("titan_checksums":"2")"), 1, "its checksums have the form '2'");
  EXPECT_REFUSED(with(known), 1, "its metadata has no checksums");
  EXPECT_REFUSED(with(known + R"(,"a":"0:1 xxh3:")"), 1, "doesn't hold 1 checksums");
  EXPECT_REFUSED(with(known + R"(,"a":"1:2 xxh3:0123456789abcdef")"), 1, "isn't the whole tensor");
  EXPECT_REFUSED(with(known + R"(,"a":"0:1 xxh3:0123456789abcdef")"), 1, "tensor 'a' is damaged");
}

TEST(Safetensors, SuggestsNamesNearAnUnknownOne) {
  TempFolder folder;
  save_safetensors(folder / "a.safetensors", {{"norm.weight", at::ones({2})}});
  try {
    SafetensorsFile(folder / "a.safetensors").info("nrom.weight");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("norm.weight"), std::string::npos);
  }
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  EXPECT_EQ(complaint("{}", 0), "");
  EXPECT_EQ(complaint("{}      ", 0), "");
  EXPECT_EQ(complaint(R"({"__metadata__":{"a":"b"}})", 0), "");
  EXPECT_EQ(complaint(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4), "");
  EXPECT_EQ(complaint(R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[4,4]},)"
                      R"("b":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}})",
                      4),
            "");
}

TEST(Safetensors, RefusesBrokenHeaders) {
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})", 4, "");
  EXPECT_REFUSED(R"( {"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, "start with '{'");
  EXPECT_REFUSED("{}\n", 0, "padded with spaces");
  EXPECT_REFUSED(std::string("{}\0{}", 5), 0, "NUL");
  EXPECT_REFUSED("[]", 0, "start with '{'");
  EXPECT_REFUSED("{\"\xff\":{}}", 0, "not valid JSON");
  EXPECT_REFUSED(R"({"a\u0007":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1, "control characters");
  EXPECT_REFUSED(R"({"a":3})", 0, "'a'");
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[1]}})", 4, "needs dtype");
  EXPECT_REFUSED(R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", 4, "unknown dtype 'F33'");
  // Refused before the rest is read: text that isn't JSON follows.
  EXPECT_REFUSED(R"({"a":{},?})", 4, "tensor 'a': needs dtype, shape and data_offsets");
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[1]},?})", 4, "needs dtype, shape and data_offsets");
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4, "unknown key 'x'");
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "negative");
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4, "64-bit integer");
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4]}})", 4,
                 "64-bit integer");
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", 4, "array");
  EXPECT_REFUSED(R"({"__metadata__":{"a":1}})", 0, "must be a string");
  EXPECT_REFUSED(R"({"__metadata__":{"a":{}}})", 0, "must be a string");
}

TEST(Safetensors, RefusesMoreTensorsOrMetadataThanAModelHas) {
  std::string tensors = "{", metadata = R"({"__metadata__":{)";
  for (int i = 0; i <= 1'001'000; ++i) {
    const std::string key = (i > 0 ? ",\"" : "\"") + std::to_string(i);
    if (i <= 1'000'000) tensors.append(key).append(R"(":{"dtype":"I8","shape":[0],"data_offsets":[0,0]})");
    metadata.append(key).append(R"(":"")");
  }
  EXPECT_REFUSED(tensors + "}", 0, "more than 1000000 tensors");
  EXPECT_REFUSED(metadata + "}}", 0, "more than 1001000 keys of metadata");
  EXPECT_THROW(detail::make_safetensors_header(std::vector<SafetensorsEntry>(1'000'001), {}), Error);
}

TEST(Safetensors, RefusesKeysThatOccurTwice) {
  EXPECT_REFUSED(R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},)"
                 R"("a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})",
                 1, "tensor 'a' occurs twice");
  EXPECT_REFUSED(R"({"a":{"dtype":"I8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1,
                 "'dtype' occurs twice");
  EXPECT_REFUSED(R"({"a":{"dtype":"I8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1,
                 "'shape' occurs twice");
  EXPECT_REFUSED(R"({"__metadata__":{"k":"1","k":"2"}})", 0, "'k' occurs twice");
  EXPECT_REFUSED(R"({"__metadata__":{},"__metadata__":{}})", 0, "occurs twice");
}

TEST(Safetensors, RefusesHolesOverlapsAndWrongSizes) {
  auto two = [](const char* first, const char* second) {
    return str(R"({"a":{"dtype":"I8","shape":[4],"data_offsets":)", first,
               R"(},"b":{"dtype":"I8","shape":[4],"data_offsets":)", second, "}}");
  };
  EXPECT_EQ(complaint(two("[0,4]", "[4,8]"), 8), "");
  EXPECT_REFUSED(two("[0,4]", "[5,9]"), 9, "hole");
  EXPECT_REFUSED(two("[1,5]", "[5,9]"), 9, "hole");
  EXPECT_REFUSED(two("[0,4]", "[3,7]"), 8, "overlaps");
  EXPECT_REFUSED(two("[0,4]", "[0,4]"), 8, "overlaps");
  EXPECT_REFUSED(two("[0,4]", "[4,8]"), 9, "the tensors end");
  EXPECT_REFUSED(two("[0,4]", "[4,8]"), 7, "outside");
  EXPECT_REFUSED(two("[0,4]", "[8,4]"), 8, "outside");
  EXPECT_REFUSED(two("[0,4]", "[4,7]"), 7, "data_offsets 3");
  EXPECT_REFUSED(two("[0,4]", "[4]"), 8, "two numbers");
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0,
                 "overflows");
  EXPECT_REFUSED(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0,
                 "overflows");
}

TEST(Safetensors, RefusesBadLengths) {
  TempFolder folder;
  auto refused = [&](const std::string& bytes, const char* words) {
    write_raw(folder / "f.safetensors", bytes);
    try {
      SafetensorsFile file(folder / "f.safetensors");
      FAIL() << "accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  refused("1234567", "7 bytes");
  refused(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8), "at most 100000000");
  refused(std::string("\x03\0\0\0\0\0\0\0{}", 10), "truncated");
}

TEST(Safetensors, RefusesDeepNestingAtOnce) {
  std::string deep = R"({"a":)" + std::string(1'000'000, '[') + std::string(1'000'000, ']') + "}";
  EXPECT_REFUSED(deep, 0, "must be described by an object");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  EXPECT_REFUSED(objects + std::string(100'000, '}'), 0, "unknown key");
}

TEST(Safetensors, RefusesEveryTruncation) {
  TempFolder folder;
  save_safetensors(folder / "a.safetensors", {{"a", at::ones({3})}, {"b", at::ones({2, 2}, at::kBFloat16)}});
  std::string bytes = read_raw(folder / "a.safetensors");
  for (size_t length = 0; length < bytes.size(); ++length) {
    write_raw(folder / "cut.safetensors", bytes.substr(0, length));
    EXPECT_THROW(SafetensorsFile(folder / "cut.safetensors"), Error) << length;
  }
  write_raw(folder / "cut.safetensors", bytes + "x");
  EXPECT_THROW(SafetensorsFile(folder / "cut.safetensors"), Error);
}

TEST(Safetensors, SurvivesMutatedHeaders) {
  TempFolder folder;
  save_safetensors(folder / "a.safetensors", {{"a", at::ones({3})}, {"b", at::ones({2, 2}, at::kByte)}},
                   {{"k", "v"}});
  const std::string bytes = read_raw(folder / "a.safetensors");
  std::mt19937 random(1);
  int taken = 0;
  for (int trial = 0; trial < 1'000; ++trial) {
    std::string mutated = bytes;
    for (int change = 0; change < 1 + trial % 3; ++change)
      mutated[random() % mutated.size()] = static_cast<char>(random());
    write_raw(folder / "m.safetensors", mutated);
    try {
      SafetensorsFile file(folder / "m.safetensors");
      for (const auto& name : file.names()) file.tensor(name).clone();
      ++taken;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(taken, 0);  // changes in the data part and in names are legal
}

TEST(Safetensors, WriterRefusesWhatTheReaderWould) {
  TempFolder folder;
  EXPECT_THROW(save_safetensors(folder / "a.safetensors", {{"a", at::ones({1})}, {"a", at::ones({1})}}),
               Error);
  EXPECT_THROW(save_safetensors(folder / "a.safetensors", {{"a\n", at::ones({1})}}), Error);
  EXPECT_THROW(save_safetensors(folder / "a.safetensors", {{"__metadata__", at::ones({1})}}), Error);
  EXPECT_THROW(save_safetensors(folder / "a.safetensors", {{"a", at::ones({1}, at::kComplexFloat)}}), Error);
  EXPECT_FALSE(std::filesystem::exists(folder / "a.safetensors"));
}

TEST(Safetensors, KeepsTheOldFileAfterAFailedWrite) {
  TempFolder folder;
  auto path = folder / "a.safetensors";
  save_safetensors(path, {{"a", at::zeros({4})}});
  std::vector<SafetensorsEntry> entries = {{"a", at::kFloat, {4}}, {"b", at::kFloat, {4}}};
  auto produce = [](size_t index) { return index == 0 ? at::ones({4}) : at::ones({5}); };
  EXPECT_THROW(write_safetensors(path, entries, {}, produce), Error);
  EXPECT_TRUE(at::equal(SafetensorsFile(path).tensor("a"), at::zeros({4})));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

}  // namespace
}  // namespace titan
