#include "training/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gnomon/attention.h"

namespace gnomon::lab {
namespace {

namespace fs = std::filesystem;

class FilesTest : public testing::Test {
 protected:
  FilesTest()
      : folder_(fs::path(testing::TempDir()) /
                (std::string("gnomon_files_") +
                 testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::remove_all(folder_);
    fs::create_directory(folder_);
  }
  ~FilesTest() override { fs::remove_all(folder_); }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  static std::string Read(const fs::path& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void Touch(const std::string& name) const { std::ofstream(folder_ / name) << "x"; }

  fs::path folder_;
};

TEST_F(FilesTest, WritersOfOneFileDoNotMeet) {
  const std::vector<std::string> texts = {std::string(1 << 20, 'a'), std::string(1 << 20, 'b')};
  const fs::path file = folder_ / "file";
  // A partial file of another writer is not removed.
  Touch("file.part");
  std::vector<std::thread> writers;
  for (const std::string& text : texts) {
    writers.emplace_back([&] {
      for (int n = 0; n < 20; ++n) WriteFileAtomically(file, {text, "."});
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::string read = Read(file);
  EXPECT_TRUE(read == texts[0] + "." || read == texts[1] + ".");
  EXPECT_EQ(Names(), (std::vector<std::string>{"file", "file.part"}));
}

TEST_F(FilesTest, LinksDevicesAndPipesStayWhatTheyAre) {
  const fs::path file = folder_ / "file";
  const fs::path link = folder_ / "link";
  Touch("file");
  fs::create_symlink("file", link);
  WriteFileAtomically(link, {"through ", "the link"});
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(Read(file), "through the link");

  // The test opens its own terminal, because a bug could, with root privileges, replace a device
  // file of the machine.
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_TRUE(terminal >= 0 && ::grantpt(terminal) == 0 && ::unlockpt(terminal) == 0);
  const fs::path device = ::ptsname(terminal);
  const fs::path to_device = folder_ / "device";
  fs::create_symlink(device, to_device);
  WriteFileAtomically(to_device, {"to the ", "device"});
  std::string shown(64, ' ');
  shown.resize(static_cast<size_t>(std::max<ssize_t>(0, ::read(terminal, shown.data(), 64))));
  EXPECT_EQ(shown, "to the device");
  EXPECT_TRUE(fs::is_symlink(to_device));
  EXPECT_TRUE(fs::is_character_file(device));
  ::close(terminal);

  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::string read;
  std::thread reader([&] { read = Read(pipe); });
  WriteFileAtomically(pipe, {"through the pipe"});
  reader.join();
  EXPECT_EQ(read, "through the pipe");
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(Names(), (std::vector<std::string>{"device", "file", "link", "pipe"}));
}

TEST_F(FilesTest, WhatAKilledWriterLeftIsRemovedAndNothingElse) {
  const std::vector<std::string> others = {"file", "file.0123456789abcdef", "file.part",
                                           "file.x123456789abcdef.part",
                                           "other.0123456789abcdef.part"};
  for (const std::string& name : others) Touch(name);
  Touch("file.0123456789abcdef.part");
  RemoveUnfinished(folder_ / "file");
  EXPECT_EQ(Names(), others);
}

TEST_F(FilesTest, AFolderIsLockedOnce) {
  std::optional<FolderLock> lock(folder_);
  try {
    const FolderLock second(folder_);
    FAIL() << "locked twice";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("another process is using the folder"),
              std::string::npos);
  }
  FolderLock moved = std::move(*lock);
  lock.reset();
  EXPECT_THROW(FolderLock{folder_}, Error);
  moved = FolderLock();
  EXPECT_NO_THROW(FolderLock{folder_});
  EXPECT_TRUE(Names().empty());
  EXPECT_THROW(FolderLock{folder_ / "absent"}, Error);
}

}  // namespace
}  // namespace gnomon::lab
