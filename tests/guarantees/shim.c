/* One system call of a whole run fails: the N-th of its kind, counted over all threads and processes.

   Loaded with LD_PRELOAD. Calls count if their file is below one of BRIM_FAULT_FOLDERS (separated by ':'); the counters
   are in the file BRIM_FAULT_BOARD, which every process maps. BRIM_FAULT says what fails: "KIND N HOW GLOB", the N-th
   call of KIND on a file that GLOB matches, where HOW is an errno, "short", or "hold": wait until the board says to go on. Without it calls are only counted, and
   BRIM_FAULT_LOG, if it is set, gets a line "KIND PATH" of each. A fault happens once, and the board says to which
   file. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { WRITE, PWRITE, FSYNC, RENAME, OPEN, READ, PREAD, COPY, LOCK, KINDS };
static const char *const NAMES[KINDS] = {"write", "pwrite", "fsync", "rename", "open", "read", "pread", "copy", "lock"};
enum { SHORT = -1, FINE = 0 };
enum { RELEASED = 14, MATCHED = 15 }; /* whether who was held may go on; how many calls BRIM_FAULT spoke of */

/* tests/guarantees/injection.py reads this. */
struct board {
  uint64_t counts[16];
  uint64_t fired;
  char path[4096];
};

static struct board *board;

static struct board *the_board(void) {
  if (board) return board;
  const char *path = getenv("BRIM_FAULT_BOARD");
  if (!path) return NULL; /* a process that forks may learn of it later */
  int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return NULL;
  void *mapped = mmap(NULL, sizeof(struct board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (mapped != MAP_FAILED) board = mapped;
  return board;
}

static int counts(const char *path) {
  const char *folders = getenv("BRIM_FAULT_FOLDERS");
  while (folders && *folders) {
    size_t size = strcspn(folders, ":");
    if (size && strncmp(path, folders, size) == 0 && (path[size] == '/' || path[size] == 0)) return 1;
    folders += size + (folders[size] == ':');
  }
  return 0;
}

static void note(enum kind kind, const char *path) {
  const char *log = getenv("BRIM_FAULT_LOG");
  if (!log || !*log) return;
  int before = errno, fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd >= 0) {
    char line[4200];
    int size = snprintf(line, sizeof line, "%s %s\n", NAMES[kind], path);
    syscall(SYS_write, fd, line, size);
    syscall(SYS_close, fd);
  }
  errno = before;
}

/* A glob that begins with a star matches paths by their end, another one folder by folder. */
static int matches(const char *glob, const char *path) {
  return fnmatch(glob, path, *glob == '*' ? 0 : FNM_PATHNAME | FNM_PERIOD) == 0;
}

/* What is to happen to a call on this file: FINE, SHORT or an errno. */
static int fault(enum kind kind, const char *path) {
  struct board *all = the_board();
  if (!all || !counts(path)) return FINE;
  __atomic_add_fetch(&all->counts[kind], 1, __ATOMIC_SEQ_CST);
  note(kind, path);
  const char *what = getenv("BRIM_FAULT");
  char name[16], how[16];
  unsigned long long wanted;
  int glob = 0;
  if (!what || sscanf(what, "%15s %llu %15s %n", name, &wanted, how, &glob) != 3 || !glob) return FINE;
  if (strcmp(name, NAMES[kind]) != 0 || !matches(what + glob, path)) return FINE;
  if (__atomic_add_fetch(&all->counts[MATCHED], 1, __ATOMIC_SEQ_CST) != wanted) return FINE;
  strncpy(all->path, path, sizeof all->path - 1);
  __atomic_store_n(&all->fired, 1, __ATOMIC_SEQ_CST);
  if (strcmp(how, "hold") == 0) {
    int before = errno;
    while (!__atomic_load_n(&all->counts[RELEASED], __ATOMIC_SEQ_CST)) usleep(2000);
    errno = before;
    return FINE;
  }
  return strcmp(how, "short") == 0 ? SHORT : atoi(how);
}

static int fault_of(enum kind kind, int fd) {
  if (!the_board()) return FINE;
  int before = errno, what = FINE;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size > 0 && path[0] == '/') {
    path[size] = 0;
    what = fault(kind, path);
  }
  errno = before;
  return what;
}

static int fault_at(enum kind kind, int folder, const char *path) {
  if (!the_board() || !path) return FINE;
  if (path[0] == '/') return fault(kind, path);
  int before = errno, what = FINE;
  char link[64], full[8192];
  if (folder == AT_FDCWD) strcpy(link, "/proc/self/cwd");
  else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  ssize_t size = readlink(link, full, 4095);
  if (size > 0) {
    snprintf(full + size, sizeof full - size, "/%s", path);
    what = fault(kind, full);
  }
  errno = before;
  return what;
}

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define FAIL_IF(what) \
  if ((what) > 0) { \
    errno = (what); \
    return -1; \
  }

/* A call with fewer bytes than were asked for, but never none: that would be the end of the file. */
#define BYTES(name, kind, pointer) \
  ssize_t name(int fd, pointer data, size_t size) { \
    REAL(name); \
    int what = fault_of(kind, fd); \
    FAIL_IF(what) \
    return real(fd, data, what == SHORT && size > 1 ? size / 2 : size); \
  }
#define BYTES_AT(name, kind, pointer) \
  ssize_t name(int fd, pointer data, size_t size, off64_t at) { \
    REAL(name); \
    int what = fault_of(kind, fd); \
    FAIL_IF(what) \
    return real(fd, data, what == SHORT && size > 1 ? size / 2 : size, at); \
  }

static struct iovec halved(const struct iovec *parts) {
  struct iovec part = parts[0];
  if (part.iov_len > 1) part.iov_len /= 2;
  return part;
}

#define PARTS(name, kind) \
  ssize_t name(int fd, const struct iovec *parts, int count) { \
    REAL(name); \
    int what = fault_of(kind, fd); \
    FAIL_IF(what) \
    if (what != SHORT || count < 1) return real(fd, parts, count); \
    struct iovec part = halved(parts); \
    return real(fd, &part, 1); \
  }
#define PARTS_AT(name, kind) \
  ssize_t name(int fd, const struct iovec *parts, int count, off64_t at) { \
    REAL(name); \
    int what = fault_of(kind, fd); \
    FAIL_IF(what) \
    if (what != SHORT || count < 1) return real(fd, parts, count, at); \
    struct iovec part = halved(parts); \
    return real(fd, &part, 1, at); \
  }
#define PARTS_AT_FLAGS(name, kind) \
  ssize_t name(int fd, const struct iovec *parts, int count, off64_t at, int flags) { \
    REAL(name); \
    int what = fault_of(kind, fd); \
    FAIL_IF(what) \
    if (what != SHORT || count < 1) return real(fd, parts, count, at, flags); \
    struct iovec part = halved(parts); \
    return real(fd, &part, 1, at, flags); \
  }

BYTES(read, READ, void *)
BYTES(write, WRITE, const void *)
BYTES_AT(pread, PREAD, void *)
BYTES_AT(pread64, PREAD, void *)
BYTES_AT(pwrite, PWRITE, const void *)
BYTES_AT(pwrite64, PWRITE, const void *)
PARTS(readv, READ)
PARTS(writev, WRITE)
PARTS_AT(preadv, PREAD)
PARTS_AT(preadv64, PREAD)
PARTS_AT(pwritev, PWRITE)
PARTS_AT(pwritev64, PWRITE)
PARTS_AT_FLAGS(preadv2, PREAD)
PARTS_AT_FLAGS(preadv64v2, PREAD)
PARTS_AT_FLAGS(pwritev2, PWRITE)
PARTS_AT_FLAGS(pwritev64v2, PWRITE)

#define SYNC(name) \
  int name(int fd) { \
    REAL(name); \
    int what = fault_of(FSYNC, fd); \
    FAIL_IF(what) \
    return real(fd); \
  }
SYNC(fsync)
SYNC(fdatasync)

int flock(int fd, int operation);
int flock(int fd, int operation) {
  REAL(flock);
  int what = fault_of(LOCK, fd);
  FAIL_IF(what)
  return real(fd, operation);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  int what = fault_at(RENAME, AT_FDCWD, to);
  FAIL_IF(what)
  return real(from, to);
}

int renameat(int from_folder, const char *from, int folder, const char *to) {
  REAL(renameat);
  int what = fault_at(RENAME, folder, to);
  FAIL_IF(what)
  return real(from_folder, from, folder, to);
}

int renameat2(int from_folder, const char *from, int folder, const char *to, unsigned flags) {
  REAL(renameat2);
  int what = fault_at(RENAME, folder, to);
  FAIL_IF(what)
  return real(from_folder, from, folder, to, flags);
}

#define MODE(flags) \
  mode_t mode = 0; \
  if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list more; \
    va_start(more, flags); \
    mode = (mode_t)va_arg(more, int); \
    va_end(more); \
  }
#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    MODE(flags) \
    int what = fault_at(OPEN, AT_FDCWD, path); \
    FAIL_IF(what) \
    return real(path, flags, mode); \
  }
#define OPENS_AT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    REAL(name); \
    MODE(flags) \
    int what = fault_at(OPEN, folder, path); \
    FAIL_IF(what) \
    return real(folder, path, flags, mode); \
  }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

#define STREAM(name) \
  FILE *name(const char *path, const char *mode) { \
    REAL(name); \
    int what = fault_at(OPEN, AT_FDCWD, path); \
    if (what > 0) { \
      errno = what; \
      return NULL; \
    } \
    return real(path, mode); \
  }
STREAM(fopen)
STREAM(fopen64)

DIR *opendir(const char *path) {
  REAL(opendir);
  int what = fault_at(OPEN, AT_FDCWD, path);
  if (what > 0) {
    errno = what;
    return NULL;
  }
  return real(path);
}

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags) {
  REAL(copy_file_range);
  int what = fault_of(COPY, to);
  FAIL_IF(what)
  return real(from, from_at, to, to_at, what == SHORT && size > 1 ? size / 2 : size, flags);
}

ssize_t sendfile64(int to, int from, off64_t *at, size_t size);
ssize_t sendfile(int to, int from, off_t *at, size_t size);
#define SENDS(name) \
  ssize_t name(int to, int from, off64_t *at, size_t size) { \
    REAL(name); \
    int what = fault_of(COPY, to); \
    FAIL_IF(what) \
    return real(to, from, at, what == SHORT && size > 1 ? size / 2 : size); \
  }
SENDS(sendfile)
SENDS(sendfile64)
