#include "titan/config/load.h"

#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::config {
namespace {

struct Twice {
  int64_t a = 0;
};
void describe(Table<Twice>& table) {
  table.field("a", &Twice::a, "once");
  table.field("a", &Twice::a, "twice");
}

struct Outside {
  int64_t a = 0;
};
void describe(Table<Outside>& table) { table.field("a", &Outside::a, "one", at_least(1)); }

struct Lost {};
void describe(Table<Lost>& table) { table.mapped("old", "new", "renamed"); }

struct Nested {
  Outside outside{.a = 1};
};
void describe(Table<Nested>& table) { table.table("outside", &Nested::outside); }

struct SomeJob {
  Nested nested;
  Twice twice;
  Outside outside{.a = 1};
  Outside wrong;
  Lost lost;
};

TEST(Schema, WrongDescriptionsAreInternalErrors) {
  auto schema = Schema::of<SomeJob>();
  EXPECT_THROW(schema.add("twice", &SomeJob::twice), InternalError);
  EXPECT_THROW(schema.add("wrong", &SomeJob::wrong), InternalError);
  EXPECT_THROW(schema.add("lost", &SomeJob::lost), InternalError);
  EXPECT_NO_THROW(schema.add("outside", &SomeJob::outside)) << "the job's default counts";
  EXPECT_THROW(schema.add("outside", &SomeJob::outside), InternalError);
  EXPECT_NO_THROW(schema.add("nested", &SomeJob::nested));
  EXPECT_THROW(schema.add("nested.outside", &SomeJob::outside), InternalError)
      << "the same key by another table";
  struct Other {
    Outside outside{.a = 1};
  };
  EXPECT_THROW(schema.add("other", &Other::outside), InternalError);
}

TEST(Schema, FindsFieldsByFullName) {
  auto schema = Schema::of<SomeJob>();
  schema.add("some.outside", &SomeJob::outside);
  ASSERT_NE(schema.find("some.outside.a"), nullptr);
  EXPECT_EQ(schema.find("some.outside.a")->default_value, Value(int64_t{1}));
  for (const char* name : {"some.outside.b", "some.outside", "some.outsidea", "a", ""})
    EXPECT_EQ(schema.find(name), nullptr);
}

}  // namespace
}  // namespace titan::config
