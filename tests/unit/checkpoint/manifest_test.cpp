#include "titan/checkpoint/manifest.h"

#include <ctime>
#include <fstream>

#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "titan/core/error.h"
#include "unit/checkpoint/sample_manifest.h"
#include "unit/checkpoint/temp_folder.h"

namespace titan::checkpoint {
namespace {

using ::testing::HasSubstr;
using testing::sample_manifest;
using ::testing::StartsWith;
using titan::testing::TempFolder;

void expect_equal(const Manifest& a, const Manifest& b) {
  EXPECT_EQ(a.run_id, b.run_id);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.library, b.library);
  EXPECT_EQ(a.num_threads, b.num_threads);
  EXPECT_EQ(a.finite, b.finite);
  EXPECT_EQ(a.config, b.config);
  EXPECT_EQ(a.texts, b.texts);
  EXPECT_EQ(a.files, b.files);
  EXPECT_EQ(a.table.world_size(), b.table.world_size());
  ASSERT_EQ(a.table.tensors().size(), b.table.tensors().size());
  for (size_t i = 0; i < a.table.tensors().size(); ++i) {
    const StateTensor &x = a.table.tensors()[i], &y = b.table.tensors()[i];
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.dtype, y.dtype);
    EXPECT_EQ(x.shape, y.shape);
    EXPECT_EQ(*x.layout, *y.layout);
  }
}

// The parser's complaint about a text; "" when it accepts it.
std::string manifest_complaint(std::string_view text) {
  try {
    parse_manifest(text, "step-500/manifest.json");
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), StartsWith("step-500/manifest.json: "));
    return error.what();
  }
  return "";
}

std::string with_digest(const std::string& rest) {
  return "{\"titan_checkpoint\":1,\"digest\":\"" + digest_of(rest) + "\",\n" + rest;
}

// The sample with the first `from` after the digest replaced by `to`, and a matching digest.
std::string changed(const std::string& from, const std::string& to) {
  const std::string text = to_text(sample_manifest());
  std::string rest = text.substr(text.find('\n') + 1);
  const size_t at = rest.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return with_digest(rest.replace(at, from.size(), to));
}

TEST(Manifest, DigestIsXxh3Of128Bits) {
  // The reference implementations: xxhsum -H128, Python's xxhash.xxh3_128_hexdigest.
  EXPECT_EQ(digest_of(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(digest_of("a").size(), 32u);
  EXPECT_NE(digest_of("a"), digest_of("b"));
}

TEST(Manifest, NamesFilesByRank) {
  EXPECT_EQ(file_name(0), "rank_00000.safetensors");
  EXPECT_EQ(file_name(123), "rank_00123.safetensors");
  EXPECT_EQ(file_name(123456), "rank_123456.safetensors");
}

TEST(Manifest, RoundTrips) {
  const Manifest manifest = sample_manifest();
  const std::string text = to_text(manifest);
  const Manifest read = parse_manifest(text, "m");
  expect_equal(read, manifest);
  EXPECT_EQ(to_text(read), text);
  // Equal layouts are one object again.
  EXPECT_EQ(read.table.tensors()[0].layout, read.table.tensors()[2].layout);
}

TEST(Manifest, IsReadableByOtherJsonParsers) {
  const auto json = nlohmann::json::parse(to_text(sample_manifest()));
  EXPECT_EQ(json["titan_checkpoint"], 1);
  const auto& manifest = json["manifest"];
  EXPECT_EQ(manifest["step"], 500);
  EXPECT_EQ(manifest["finite"], false);
  EXPECT_EQ(manifest["texts"]["dataloader"], "{\"lanes\":[1,2]}");
  EXPECT_EQ(manifest["files"][3][0], 1003);
  EXPECT_EQ(manifest["tensors"][2], nlohmann::json::parse(R"(["model.w","BF16",[7,3],0])"));
  EXPECT_EQ(manifest["layouts"][0][1],
            nlohmann::json::parse(R"({"axis":"fsdp","size":2,"stride":1,"dim":0,"only":-1})"));
  EXPECT_EQ(manifest["layouts"][1], nlohmann::json::array());
}

TEST(Manifest, KeepsUtf8AndReplacesOtherBytes) {
  Manifest manifest = sample_manifest();
  const std::string odd("quote \" slash \\ \n\t\0 \x1f \x7f é 漢 \xf0\x9f\x99\x82", 36);
  manifest.config = odd;
  manifest.texts["dataloader"] = odd;
  Manifest read = parse_manifest(to_text(manifest), "m");
  EXPECT_EQ(read.config, odd);
  EXPECT_EQ(read.texts.at("dataloader"), odd);

  manifest.config =
      "a\xff"
      "b";
  manifest.library = "\xc3";
  manifest.texts["dataloader"] = "\xed\xa0\x80";  // half of a surrogate pair
  read = parse_manifest(to_text(manifest), "m");
  EXPECT_EQ(read.config,
            "a\xef\xbf\xbd"
            "b");
  EXPECT_EQ(read.library, "\xef\xbf\xbd");
  EXPECT_THAT(read.texts.at("dataloader"), StartsWith("\xef\xbf\xbd"));
}

TEST(Manifest, DetectsEveryFlippedBit) {
  const std::string text = to_text(sample_manifest());
  for (size_t i = 0; i < 8 * text.size(); ++i) {
    std::string flipped = text;
    flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ (1 << i % 8));
    ASSERT_NE(manifest_complaint(flipped), "") << "bit " << i % 8 << " of byte " << i / 8;
  }
}

TEST(Manifest, DetectsEveryTruncationAndAddedByte) {
  const std::string text = to_text(sample_manifest());
  for (size_t length = 0; length < text.size(); ++length)
    ASSERT_NE(manifest_complaint(text.substr(0, length)), "") << length;
  for (const char* more : {"\n", " ", "}", "x"})
    EXPECT_THAT(manifest_complaint(text + more), HasSubstr("its digest is"));
  EXPECT_NE(manifest_complaint(text + std::string(1, '\0')), "");
}

TEST(Manifest, BeginningHasExactlyOneForm) {
  const std::string text = to_text(sample_manifest());
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    return manifest_complaint(other.replace(other.find(from), from.size(), to));
  };
  EXPECT_THAT(manifest_complaint(""), HasSubstr("not a checkpoint's manifest"));
  EXPECT_THAT(manifest_complaint("{}"), HasSubstr("not a checkpoint's manifest"));
  EXPECT_THAT(replaced(":1,", ":2,"), HasSubstr("format 2, which is newer than this library's, 1"));
  EXPECT_THAT(replaced(":1,", ":0,"), HasSubstr("no format number"));
  EXPECT_THAT(replaced(":1,", ":01,"), HasSubstr("no format number"));
  EXPECT_THAT(replaced(":1,", ":-1,"), HasSubstr("no format number"));
  EXPECT_THAT(replaced(":1,", ":99999999999999999999,"), HasSubstr("no format number"));
  EXPECT_THAT(replaced(":1,", ":1 ,"), HasSubstr("no format number"));
  EXPECT_THAT(replaced("\"digest\"", "\"Digest\""), HasSubstr("the digest is missing"));
  EXPECT_THAT(replaced("\",\n", "\", "), HasSubstr("the end of the line"));
}

struct Hostile {
  std::string from, to, why;
};

class HostileManifests : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileManifests, AreRefused) {
  EXPECT_THAT(manifest_complaint(changed(GetParam().from, GetParam().to)), HasSubstr(GetParam().why));
}

const std::string kW = R"(["model.w","BF16",[7,3],0])";
const std::string kFsdp = R"("axis":"fsdp","size":2,"stride":1,"dim":0)";
const std::string kRunId = "0123456789abcdef0123456789abcdef";

INSTANTIATE_TEST_SUITE_P(
    Json, HostileManifests,
    ::testing::Values(
        Hostile{"\"step\":500", "\"step\":500,\"step\":501", "manifest.step: duplicate key"},
        Hostile{"\"step\":500", "\"step\":500,\"stop\":1", "manifest: unknown key 'stop'"},
        Hostile{"\"step\":500,", "", "manifest: key 'step' is missing"},
        Hostile{"\"step\":500", "\"step\":\"500\"", "manifest.step: a string; expected an integer"},
        Hostile{"\"step\":500", "\"step\":500.0", "manifest.step: a number that is no 64-bit integer"},
        Hostile{"\"step\":500", "\"step\":5e2", "manifest.step: a number that is no 64-bit integer"},
        Hostile{"\"step\":500", "\"step\":1e400", "not valid JSON"},
        Hostile{"\"step\":500", "\"step\":9223372036854775808",
                "manifest.step: 9223372036854775808 is no 64-bit"},
        Hostile{"\"step\":500", "\"step\":-500", "step -500 is negative"},
        Hostile{"\"step\":500", "\"step\":null", "manifest.step: null"},
        Hostile{"\"step\":500", "\"step\":[500]", "manifest.step: an array; expected an integer"},
        Hostile{"\"finite\":false", "\"finite\":0", "manifest.finite: a number; expected true or false"},
        Hostile{"\"num_threads\":2", "\"num_threads\":2000000", "num_threads 2000000; 0 to 1000000"},
        Hostile{"\"num_threads\":2", "\"num_threads\":true", "manifest.num_threads: true or false; expected"},
        Hostile{kRunId, "0123456789ABCDEF0123456789abcdef", "run_id has to be 32 lower-case"},
        Hostile{kRunId, "", "run_id has to be 32 lower-case"},
        Hostile{kRunId, kRunId + "0", "run_id has to be 32 lower-case"},
        Hostile{"titan 0.1.0", std::string(1, '\0'), "NUL"}, Hostile{"titan 0.1.0", "\xff", "not valid JSON"},
        Hostile{"titan 0.1.0", "\\ud800", "not valid JSON"}, Hostile{"titan 0.1.0", "\n", "not valid JSON"},
        Hostile{"\"manifest\":{", "\"manifest\":[", "manifest: an array; expected an object"},
        Hostile{"\"manifest\":{", "\"digest\":\"\",\"manifest\":{", "digest: duplicate key"},
        Hostile{"}}\n", "}}{}", "not valid JSON"}, Hostile{"}}\n", "}}]", "not valid JSON"},
        Hostile{"}}\n", "}", "not valid JSON"}));

INSTANTIATE_TEST_SUITE_P(
    Contents, HostileManifests,
    ::testing::Values(
        Hostile{kW, R"(["model.w","BF16",[7,3],2])", "tensors[2]: layout 2 of 2"},
        Hostile{kW, R"(["model.w","BF16",[7,3],-1])", "tensors[2]: layout -1 of 2"},
        Hostile{kW, R"(["model.w","BF16",[7,3]])", "manifest.tensors[2]: ends before its layout"},
        Hostile{kW, R"(["model.w","BF16",[7,3],0,0])", "manifest.tensors[2]: more than 4 values"},
        Hostile{kW, R"({"name":"model.w"})", "manifest.tensors[2]: an object; expected an array"},
        Hostile{kW, R"(["model.w","BF17",[7,3],0])", "manifest.tensors[2]: unknown dtype 'BF17'"},
        Hostile{kW, R"(["model.v","BF16",[7,3],0])", "two tensors are named 'model.v'"},
        Hostile{kW, R"(["../w","BF16",[7,3],0])", "contains '/'"},
        Hostile{kW, R"(["..w","BF16",[7,3],0])", "contains '..'"},
        Hostile{kW, R"(["w\u0000","BF16",[7,3],0])", "control characters"},
        Hostile{kW, R"(["","BF16",[7,3],0])", "a tensor's name is empty"},
        Hostile{kW, R"([7,"BF16",[7,3],0])", "manifest.tensors[2].name: a number; expected a string"},
        Hostile{kW, R"(["model.w","BF16",[7,-3],0])", "sizes can't be negative"},
        Hostile{kW, R"(["model.w","BF16",[4294967296,4294967296],0])", "more than 2^56 elements"},
        Hostile{kW, R"(["model.w","BF16",[9223372036854775807,0],0])", "more than 2^56 elements"},
        Hostile{kW, R"(["model.w","BF16",[7,[3]],0])", "manifest.tensors[2].shape[1]: an array, where none"},
        Hostile{kW, R"(["model.w","BF16",[7,"3"],0])", "manifest.tensors[2].shape[1]: a string, where none"},
        Hostile{kW, R"(["model.w","BF16",[],0])",
                "tensor 'model.w': axis 'fsdp' (size 2, stride 1) splits dim 0"},
        Hostile{kFsdp, R"("axis":"fsdp","size":3,"stride":1,"dim":0)", "isn't independent of a faster axis"},
        Hostile{kFsdp, R"("axis":"fsdp","size":2,"stride":4,"dim":0)", "needs more than 4 ranks"},
        Hostile{kFsdp, R"("axis":"fsdp","size":0,"stride":1,"dim":0)", "size has to be 2 or more"},
        Hostile{kFsdp, R"("axis":"fs/dp","size":2,"stride":1,"dim":0)", "an axis' name 'fs/dp' contains '/'"},
        Hostile{kFsdp, R"("axis":"fsdp","size":2,"stride":1)",
                "manifest.layouts[0][1]: key 'dim' is missing"},
        Hostile{kFsdp, kFsdp + ",\"dim\":1", "manifest.layouts[0][1].dim: duplicate key"},
        Hostile{"\"layouts\":[", "\"layouts\":[7,", "manifest.layouts[0]: a number; expected an array"},
        Hostile{"\"layouts\":[", "\"layouts\":[{},", "manifest.layouts[0]: an object; expected an array"},
        Hostile{"\"files\":[", "\"files\":[[-1,\"" + kRunId + "\"],", "files[0]: -1 bytes"},
        Hostile{"\"files\":[", "\"files\":[[1,\"x\"],", "files[0]: the digest has to be"},
        Hostile{"\"files\":[", "\"files\":[[1,\"" + kRunId + "\"],", "ranks"},
        Hostile{"\"train_state\":", "\"train/state\":", "a text's name 'train/state' contains '/'"},
        Hostile{"\"train_state\":", "\"dataloader\":", "manifest.texts.dataloader: duplicate key"},
        Hostile{"\"train_state\":\"\"", "\"train_state\":{}",
                "manifest.texts.train_state: an object, where none"}));

TEST(Manifest, RefusesDeepNestingAtOnce) {
  for (const std::string open : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 1'000'000; ++i) deep += open;
    EXPECT_THAT(manifest_complaint(changed("\"step\":500", "\"step\":" + deep)),
                HasSubstr("manifest.step: an "));
    EXPECT_NE(manifest_complaint(deep), "");
  }
}

TEST(Manifest, LimitsCounts) {
  const std::string text = to_text(sample_manifest());
  const auto many = [](const std::string& what, int count) {
    std::string list = what;
    for (int i = 1; i < count; ++i) list += "," + what;
    return list;
  };
  EXPECT_THAT(manifest_complaint(changed("\"layouts\":[", "\"layouts\":[" + many("[]", 100'001) + ",")),
              HasSubstr("manifest.layouts[100000]: more than 100000 elements"));
  EXPECT_THAT(manifest_complaint(changed("[7,3]", "[" + many("1", 65) + "]")),
              HasSubstr("more than 64 numbers"));
  std::string texts;
  for (int i = 0; i < 1001; ++i) texts += str("\"t", i, "\":\"\",");
  EXPECT_THAT(manifest_complaint(changed("\"texts\":{", "\"texts\":{" + texts)),
              HasSubstr("more than 1000 texts"));
  EXPECT_THAT(manifest_complaint(std::string(kMaxManifestBytes + 1, ' ')),
              HasSubstr("100000001 bytes; at most 100000000"));
}

TEST(Manifest, RefusesToWriteWhatItCouldNotRead) {
  const auto problem = [](const std::function<void(Manifest&)>& change) -> std::string {
    Manifest manifest = sample_manifest();
    change(manifest);
    try {
      to_text(manifest);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(problem([](Manifest& m) { m.run_id = "me"; }), HasSubstr("run_id"));
  EXPECT_THAT(problem([](Manifest& m) { m.step = -1; }), HasSubstr("step -1"));
  EXPECT_THAT(problem([](Manifest& m) { m.texts["a\n"] = ""; }), HasSubstr("control characters"));
  EXPECT_THAT(problem([](Manifest& m) { m.files.pop_back(); }), HasSubstr("3 files and a table for 4 ranks"));
  EXPECT_THAT(problem([](Manifest& m) { m.files[2].header_digest = ""; }), HasSubstr("files[2]"));
  EXPECT_THAT(problem([](Manifest& m) {
                for (FileRecord& file : m.files) file.num_bytes = int64_t{1} << 61;
              }),
              HasSubstr("bytes together, up to files[2]"));
  EXPECT_THAT(problem([](Manifest& m) { m.config = std::string(kMaxManifestBytes, 'x'); }),
              HasSubstr("at most 100000000"));
}

TEST(Manifest, IsReadFromAFolder) {
  TempFolder folder;
  const auto problem = [&]() -> std::string {
    try {
      read_manifest(folder.path());
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr((folder / kManifestName).string()));
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(problem(), HasSubstr("No such file"));
  std::filesystem::create_directory(folder / kManifestName);
  EXPECT_THAT(problem(), HasSubstr("not a regular file"));
  std::filesystem::remove(folder / kManifestName);
  ASSERT_EQ(mkfifo((folder / kManifestName).c_str(), 0600), 0);
  EXPECT_THAT(problem(), HasSubstr("not a regular file"));
  std::filesystem::remove(folder / kManifestName);
  std::ofstream(folder / kManifestName, std::ios::binary) << to_text(sample_manifest());
  expect_equal(read_manifest(folder.path()), sample_manifest());
  // The file is sparse: reading it would take a terabyte of memory.
  std::filesystem::resize_file(folder / kManifestName, uintmax_t{1} << 40);
  EXPECT_THAT(problem(), HasSubstr("1099511627776 bytes; at most 100000000"));
}

TEST(Manifest, ReadsThousandsOfRanksQuickly) {
  Manifest manifest = sample_manifest();
  std::vector<StateTensor> tensors;
  const auto layout = std::make_shared<const TensorLayout>(
      TensorLayout{{{.name = "tp", .size = 8, .stride = 1, .dim = 0},
                    {.name = "fsdp", .size = 512, .stride = 8, .dim = 0}}});
  for (int i = 0; i < 5000; ++i)
    tensors.push_back({.name = str("optimizer.exp_avg.layers.", i, ".attention.wq.weight"),
                       .dtype = at::kFloat,
                       .shape = {16384, 16384},
                       .layout = layout});
  manifest.table = StateTable(std::move(tensors), 4096);
  manifest.files.assign(4096, {.num_bytes = 123'456'789'012, .header_digest = digest_of("x")});
  const std::clock_t start = std::clock();  // this process's time, because others may use the cores
  const std::string text = to_text(manifest);
  expect_equal(parse_manifest(text, "m"), manifest);
  EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 0.5);
  EXPECT_LT(text.size(), 1'000'000u);
}

}  // namespace
}  // namespace titan::checkpoint
