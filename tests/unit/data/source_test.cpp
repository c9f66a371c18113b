#include "titan/data/source.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>

#include "core/hash.h"
#include "data/sources/files.h"
#include "fake_source.h"
#include "temporary_folder.h"

namespace titan::data {
namespace {

class SourceTest : public testing::Test {
 protected:
  std::shared_ptr<const Source> build(const std::string& kind, const std::filesystem::path& path,
                                      DataSettings settings = {}) {
    return build_source(
        kind, {.path = path.string(), .settings = settings, .cache_folder = folder_.path() / "cache"});
  }
  std::string refusal(const std::string& kind, const std::filesystem::path& path,
                      DataSettings settings = {}) {
    return message_of<ConfigError>([&] { build(kind, path, settings); });
  }
  static std::string whole(const Source& source, int64_t i) {
    std::string text;
    source.read(i, 0, source.length(i), text);
    return text;
  }
  static std::multiset<std::string> texts(const Source& source) {
    std::multiset<std::string> all;
    for (int64_t i = 0; i < source.size(); ++i) all.insert(whole(source, i));
    return all;
  }
  TemporaryFolder folder_;
};

using Texts = std::multiset<std::string>;

TEST_F(SourceTest, AFileIsADocument) {
  auto source = build("text", folder_.write("a.txt", "hello world"));
  ASSERT_EQ(source->size(), 1);
  EXPECT_EQ(source->length(0), 11);
  std::string part;
  source->read(0, 6, 5, part);
  EXPECT_EQ(part, "world");
}

TEST_F(SourceTest, SearchesFoldersForExtensions) {
  folder_.write("data/x/a.h", "1");
  folder_.write("data/b.hpp", "2");
  folder_.write("data/c.txt", "3");
  folder_.write("data/.git/d.h", "4");
  folder_.write("data/.hidden.h", "5");
  auto data = folder_.path() / "data";
  EXPECT_EQ(texts(*build("text", data)), (Texts{"1", "2", "3"}));
  EXPECT_EQ(texts(*build("text", data, {.extensions = {".h", ".hpp"}})), (Texts{"1", "2"}));
  EXPECT_EQ(texts(*build("cpp_headers", data)), (Texts{"1", "2"}));
  EXPECT_NE(refusal("text", data, {.extensions = {".cu"}}).find(".cu"), std::string::npos);
}

TEST_F(SourceTest, SelectsFilesByGlob) {
  folder_.write("data/x/a1.txt", "1");
  folder_.write("data/x/y/a2.txt", "2");
  folder_.write("data/z/a3.md", "3");
  auto data = folder_.path() / "data";
  EXPECT_EQ(texts(*build("text", data / "*/a?.*")), (Texts{"1", "3"}));
  EXPECT_EQ(texts(*build("text", data / "**/*.txt")), (Texts{"1", "2"}));
  EXPECT_EQ(texts(*build("text", data / "[xz]")), (Texts{"1", "2", "3"}));
  EXPECT_NE(refusal("text", data / "*.none").find("*.none"), std::string::npos);
}

// By the first bytes or, for an empty file, the name.
TEST_F(SourceTest, RefusesFilesThatArePlainlySomethingElse) {
  std::string noise;
  for (uint64_t i = 0; i < 500; ++i) noise += hex(mix(i));
  std::string bytes;
  for (size_t i = 0; i + 1 < noise.size(); i += 2)
    bytes += static_cast<char>(std::stoi(noise.substr(i, 2), nullptr, 16));
  struct Case {
    const char* name;
    std::string contents;
    const char* what;
  };
  const std::string lines = "{\"text\": \"one\"}\n{\"text\": \"two\"}\n";
  for (const auto& [name, contents, what] : std::vector<Case>{
           {"a.parquet", "", "a.parquet is a Parquet file by its name, and empty"},
           {"a.txt", "PAR1" + bytes, "is a Parquet file"},
           {"a.txt", std::string("ARROW1\0\0", 8) + bytes, "is an Arrow file"},
           {"a.gz", "\x1f\x8b\x08" + bytes, "is gzip-compressed."},
           {"a.txt", "\x28\xb5\x2f\xfd" + bytes, "is zstd-compressed"},
           {"a.txt", "\x93NUMPY" + bytes, "is a NumPy array"},
           {"a.txt", std::string("\x40\0\0\0\0\0\0\0{\"a\":", 13), "is a safetensors file"},
           {"a.bin", bytes, "is binary, not text"},
           {"a.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"}}) {
    const auto path = folder_.write(name, contents);
    for (const char* kind : {"text", "jsonl"})
      EXPECT_NE(refusal(kind, path).find(what), std::string::npos) << refusal(kind, path);
    if (!contents.empty()) EXPECT_EQ(texts(*build("text", path, {.check_contents = false})), Texts{contents});
    std::filesystem::remove(path);
  }
  EXPECT_NE(refusal("text", folder_.write("a.txt", lines)).find("is JSON Lines"), std::string::npos);
  EXPECT_NE(refusal("text", folder_.path() / "a.txt").find("training.dataset = \"jsonl\" reads it"),
            std::string::npos);
  EXPECT_NE(refusal("text", folder_.write("a.jsonl", lines.substr(0, 8))).find("is JSON Lines"),
            std::string::npos);
  EXPECT_EQ(build("jsonl", folder_.path() / "a.txt")->size(), 2);
  const std::string long_line = "{\"text\": \"" + std::string(20'000, 'a') + "\"}\n";
  EXPECT_NE(refusal("text", folder_.write("long.txt", lines.substr(0, 16) + long_line)).find("is JSON Lines"),
            std::string::npos);
  EXPECT_NE(refusal("text", folder_.write("long.json", long_line + lines)).find("is JSON Lines"),
            std::string::npos);
  EXPECT_NE(refusal("text", folder_.write("empty.txt", "")).find("has no text"), std::string::npos);
}

TEST_F(SourceTest, ReadsUnusualText) {
  for (const std::string& text :
       {std::string("abc"), std::string("{\n  \"a\": 1\n}\n"), std::string("{\"a\": 1}\nand text\n"),
        std::string("\x1b[31mred\x1b[0m\f\n"), std::string("Gr\xfc\xdf"), std::string("[1]\n[2]\n")})
    EXPECT_EQ(texts(*build("text", folder_.write("a.txt", text))), Texts{text});
}

TEST_F(SourceTest, NamesMissingFilesAndKinds) {
  EXPECT_NE(refusal("text", folder_.path() / "nowhere").find("nowhere"), std::string::npos);
  EXPECT_NE(refusal("text", "").find("training.dataset_path"), std::string::npos);
  auto unknown = refusal("texts", "x");
  EXPECT_NE(unknown.find("jsonl"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("did you mean 'text'"), std::string::npos) << unknown;
}

TEST_F(SourceTest, NamesAnUnreadableFileBeforeTraining) {
  chmod(folder_.path().c_str(), 0755);
  chmod(folder_.write("secret.txt", "x").c_str(), 0);
  std::filesystem::create_symlink(folder_.path() / "gone", folder_.path() / "link.txt");
  uid_t user = geteuid();
  ASSERT_EQ(seteuid(user == 0 ? 65534 : user), 0);  // root can read everything, nobody can't
  std::string message = refusal("text", folder_.path());
  ASSERT_EQ(seteuid(user), 0);
  EXPECT_NE(message.find("secret.txt"), std::string::npos) << message;
  EXPECT_NE(message.find("link.txt"), std::string::npos) << message;
}

TEST_F(SourceTest, NamesAFileThatShrinksOrDisappears) {
  auto file = folder_.write("a.txt", "0123456789");
  auto source = build("text", file);
  folder_.write("a.txt", "01234");
  std::string text;
  EXPECT_NE(message_of<Error>([&] { source->read(0, 0, 10, text); }).find("a.txt"), std::string::npos);
  std::filesystem::remove(file);
  EXPECT_NE(message_of<Error>([&] { source->read(0, 0, 10, text); }).find("a.txt"), std::string::npos);
}

TEST_F(SourceTest, FingerprintsDependOnContentsNotPaths) {
  for (const char* copy : {"one", "two"})
    for (const char* name : {"a.txt", "b.txt"})
      folder_.write(std::string(copy) + "/" + name, std::string("text of ") + name);
  auto one = build("text", folder_.path() / "one")->fingerprint();
  EXPECT_EQ(one, build("text", folder_.path() / "two")->fingerprint());
  folder_.write("two/b.txt", "TEXT of b.txt");
  EXPECT_NE(one, build("text", folder_.path() / "two")->fingerprint());
  std::filesystem::rename(folder_.path() / "one/b.txt", folder_.path() / "one/c.txt");
  EXPECT_NE(one, build("text", folder_.path() / "one")->fingerprint());
}

TEST_F(SourceTest, ReadsOneDocumentPerLineOfJsonLines) {
  auto file = folder_.write(
      "a.jsonl", "{\"text\": \"one\"}\r\n\n  \n{\"id\": 7, \"text\": \"t\\u00fc\\n2\"}\n{\"text\": \"\"}");
  auto source = build("jsonl", file);
  EXPECT_EQ(texts(*source), (Texts{"one", "tü\n2", ""}));
  std::string part;
  source->read(1, 1, 2, part);
  EXPECT_EQ(part, "ü");
  EXPECT_EQ(texts(*build("jsonl", folder_.write("b.jsonl", "{\"body\": \"x\"}"), {.text_field = "body"})),
            (Texts{"x"}));
}

TEST_F(SourceTest, StopsAtBrokenLinesOrSkipsThem) {
  auto file = folder_.write(
      "a.jsonl",
      "{\"text\": \"one\"}\n{\"text\": \n[1]\n{\"texts\": 1}\n{\"text\": 1}\n{\"text\": \"two\"}\n");
  EXPECT_NE(refusal("jsonl", file).find("a.jsonl:2: "), std::string::npos) << refusal("jsonl", file);
  EXPECT_EQ(texts(*build("jsonl", file, {.on_bad_line = "skip"})), (Texts{"one", "two"}));
  EXPECT_NE(
      refusal("jsonl", folder_.write("b.jsonl", "\n{\"txt\": \"x\"}\n")).find("b.jsonl:2: no member 'text'"),
      std::string::npos);
  EXPECT_NE(refusal("jsonl", folder_.write("c.jsonl", "\n\n")).find("no documents"), std::string::npos);
  auto large = folder_.write("e.jsonl", "{\"text\": \"x\", \"score\": 1e999}");
  EXPECT_NE(refusal("jsonl", large).find("e.jsonl:1: broken JSON: "), std::string::npos);
  auto hidden = folder_.write("d.jsonl", std::string("{\"text\": \"x\"}\0{", 15));
  EXPECT_NE(refusal("jsonl", hidden).find("d.jsonl:1: broken JSON: a NUL byte"), std::string::npos);
}

TEST_F(SourceTest, DetectsJsonLinesThatChangeAfterIndexing) {
  auto file = folder_.write("a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n");
  auto source = build("jsonl", file);
  folder_.write("a.jsonl", "{\"text\": \"one, longer\"}\n{\"text\": \"two\"}\n");
  EXPECT_NE(message_of<Error>([&] { whole(*source, 1); }).find("a.jsonl has changed"), std::string::npos);
}

// Other contents show, even of JSON Lines, whose documents aren't counted.
TEST_F(SourceTest, QuickFingerprintsAreThoseOfTheSource) {
  const auto quick = [&](const std::string& kind, const std::filesystem::path& path,
                         const std::string& before, const std::string& text_field = "text") {
    return quick_fingerprint(
        kind, {.path = path.string(), .settings = {.text_field = text_field}, .cache_folder = {}}, before);
  };
  const std::string line = "{\"text\": \"one\"}\n";
  for (const std::string kind : {"text", "jsonl"}) {
    const auto path = folder_.write("a." + kind, kind == "text" ? "one" : line + line);
    const std::string before = build(kind, path)->fingerprint();
    EXPECT_EQ(quick(kind, path, before), before);
    EXPECT_EQ(quick(kind, path, "") == before, kind == "text");
    folder_.write("a." + kind, kind == "text" ? "two" : line + "{\"text\": \"two\"}\n");
    EXPECT_NE(quick(kind, path, before), before);
  }
  const std::string before = build("jsonl", folder_.path() / "a.jsonl")->fingerprint();
  EXPECT_NE(quick("jsonl", folder_.path() / "a.jsonl", before, "body"), before);
  EXPECT_EQ(quick("of a user", "", before), before);
}

TEST_F(SourceTest, SyntheticTextIsSeededAndReadableInParts) {
  auto source = build("synthetic", "", {.seed = 3, .synthetic_documents = 50});
  EXPECT_EQ(source->size(), 50);
  EXPECT_EQ(texts(*source), texts(*build("synthetic", "", {.seed = 3, .synthetic_documents = 50})));
  EXPECT_NE(texts(*source), texts(*build("synthetic", "", {.seed = 4, .synthetic_documents = 50})));
  for (int64_t i : {0, 7, 49}) {
    std::string text = whole(*source, i), part;
    EXPECT_EQ(static_cast<int64_t>(text.size()), source->length(i));
    source->read(i, 100, 50, part);
    EXPECT_EQ(part, text.substr(100, 50));
  }
}

TEST_F(SourceTest, FindsTheHeadersOfTheLoadedLibTorch) { EXPECT_GT(build("cpp_headers", "")->size(), 1000); }

TEST_F(SourceTest, UsersAddKinds) {
  source_kinds().add("of_a_test", [](const SourceRequest& request) -> std::shared_ptr<const Source> {
    return std::make_shared<FakeSource>(std::vector<std::string>{request.path});
  });
  EXPECT_EQ(texts(*build("Of_A_Test", "where")), (Texts{"where"}));
}

}  // namespace
}  // namespace titan::data
