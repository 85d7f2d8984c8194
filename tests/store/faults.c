/* Operations on files that fail, stop half-way, or kill the process: for `tests/store/faulty.py`, by LD_PRELOAD.

   Every function of the C library with which a program changes files is put in front of the real one here, and those
   that read, if that is asked for. Calls on what lies below one folder are counted, from 1, and noted down in memory that
   the parent of the process sees too; at the chosen one happens what `faults_arm` was told. The system calls behind the
   library's back of a program that makes them itself are not seen: the test looks for the names that must be there. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, KILL_AFTER, FAIL, FAIL_FROM, SHORT_FROM };
enum action { GO, PART, LAST, REFUSE };

#define LOG_BYTES (8 << 20)

struct notes {
    atomic_long count;
    atomic_size_t used;
    char text[LOG_BYTES];
};

static struct notes *notes;
static char folder[PATH_MAX];
static int armed, fault, number, reads;
static long target;

__attribute__((constructor)) static void start(void) {
    notes = mmap(NULL, sizeof *notes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (notes == MAP_FAILED) abort();
}

/* From now on, in this process: `what` happens at operation `at` below `below`; `error` is what FAIL fails with. */
void faults_arm(const char *below, long at, int what, int error, int with_reads) {
    armed = 0;
    snprintf(folder, sizeof folder, "%s", below);
    target = at, fault = what, number = error, reads = with_reads;
    atomic_store(&notes->count, 0);
    atomic_store(&notes->used, 0);
    armed = 1;
}

void faults_disarm(void) { armed = 0; }

/* A line for each operation: its name, and the path without the folder. */
const char *faults_notes(void) {
    size_t used = atomic_load(&notes->used);
    notes->text[used < LOG_BYTES ? used : LOG_BYTES - 1] = 0;
    return notes->text;
}

static void end(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static enum action decide(const char *name, const char *path, int divisible) {
    size_t own = strlen(folder);
    if (strncmp(path, folder, own) != 0 || (path[own] && path[own] != '/')) return GO;
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s\n", name, path + own + (path[own] != 0));
    if (length >= (int)sizeof line) length = sizeof line - 1;
    size_t at = atomic_fetch_add(&notes->used, length);
    if (at + length < LOG_BYTES) memcpy(notes->text + at, line, length);
    long count = atomic_fetch_add(&notes->count, 1) + 1;
    switch (fault) {
    case KILL:
        if (count == target) end();
        return GO;
    case KILL_AFTER: return count == target ? LAST : GO;
    case FAIL:
        if (count != target) return GO;
        errno = number;
        return REFUSE;
    case FAIL_FROM:
        if (count < target) return GO;
        errno = number;
        return REFUSE;
    case SHORT_FROM: return divisible && count >= target ? PART : GO;
    default: return GO;
    }
}

static enum action step_at(const char *name, int base, const char *path, int divisible) {
    if (!armed || !path) return GO;
    int before = errno;
    char whole[2 * PATH_MAX], link[64];
    if (path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        if (base == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", base);
        ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX);
        errno = before;
        if (length < 0) return GO;
        snprintf(whole + length, sizeof whole - length, "%s%s", path[0] ? "/" : "", path);
    }
    return decide(name, whole, divisible);
}

static enum action step_on(const char *name, int file, int divisible) {
    return file < 0 ? GO : step_at(name, file, "", divisible);
}

/* The real function of this name, of the type of the one that is being defined. */
#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define DONE(action, result) \
    do { \
        __typeof__(result) outcome = (result); \
        if ((action) == LAST) end(); \
        return outcome; \
    } while (0)

static size_t part(enum action action, size_t length) { return action == GO || length < 2 ? length : (length + 1) / 2; }

/* Functions that do all or nothing. */
#define WHOLE(type, name, said, parameters, arguments, step) \
    type name parameters { \
        REAL(name); \
        enum action action = step; \
        if (action == REFUSE) return -1; \
        DONE(action, real arguments); \
    }
#define ON_FILE(name, said, parameters, arguments) WHOLE(int, name, said, parameters, arguments, step_on(said, file, 0))
#define ON_PATH(name, said, parameters, arguments, base, path) \
    WHOLE(int, name, said, parameters, arguments, step_at(said, base, path, 0))

ON_FILE(fsync, "fsync", (int file), (file))
ON_FILE(fdatasync, "fsync", (int file), (file))
ON_FILE(ftruncate, "ftruncate", (int file, off_t size), (file, size))
ON_FILE(ftruncate64, "ftruncate", (int file, off64_t size), (file, size))
ON_FILE(fallocate, "fallocate", (int file, int mode, off_t at, off_t size), (file, mode, at, size))
ON_FILE(fallocate64, "fallocate", (int file, int mode, off64_t at, off64_t size), (file, mode, at, size))
ON_FILE(fchmod, "fchmod", (int file, mode_t mode), (file, mode))
ON_FILE(fchown, "fchown", (int file, uid_t user, gid_t group), (file, user, group))
ON_PATH(truncate, "truncate", (const char *path, off_t size), (path, size), AT_FDCWD, path)
ON_PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
ON_PATH(mkdirat, "mkdir", (int base, const char *path, mode_t mode), (base, path, mode), base, path)
ON_PATH(rmdir, "rmdir", (const char *path), (path), AT_FDCWD, path)
ON_PATH(unlink, "unlink", (const char *path), (path), AT_FDCWD, path)
ON_PATH(unlinkat, flags & AT_REMOVEDIR ? "rmdir" : "unlink", (int base, const char *path, int flags), (base, path, flags), base, path)
ON_PATH(rename, "rename", (const char *from, const char *to), (from, to), AT_FDCWD, to)
ON_PATH(renameat, "rename", (int a, const char *from, int b, const char *to), (a, from, b, to), b, to)
ON_PATH(renameat2, "rename", (int a, const char *from, int b, const char *to, unsigned flags), (a, from, b, to, flags), b, to)
ON_PATH(link, "link", (const char *from, const char *to), (from, to), AT_FDCWD, to)
ON_PATH(linkat, "link", (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags), b, to)
ON_PATH(symlink, "symlink", (const char *from, const char *to), (from, to), AT_FDCWD, to)

/* These give the error instead of setting it. */
#define ALLOCATE(name, type) \
    int name(int file, type at, type size) { \
        REAL(name); \
        enum action action = step_on("fallocate", file, 0); \
        if (action == REFUSE) return errno; \
        DONE(action, real(file, at, size)); \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

/* Functions that may do a part. */
#define MOVES(name, said, parameters, arguments, file, count) \
    ssize_t name parameters { \
        REAL(name); \
        enum action action = step_on(said, file, 1); \
        if (action == REFUSE) return -1; \
        count = part(action, count); \
        DONE(action, real arguments); \
    }

MOVES(write, "write", (int file, const void *bytes, size_t count), (file, bytes, count), file, count)
MOVES(pwrite, "write", (int file, const void *bytes, size_t count, off_t at), (file, bytes, count, at), file, count)
MOVES(pwrite64, "write", (int file, const void *bytes, size_t count, off64_t at), (file, bytes, count, at), file, count)
MOVES(copy_file_range, "copy", (int from, off64_t *a, int to, off64_t *b, size_t count, unsigned flags), (from, a, to, b, count, flags), to, count)

/* Of several stretches the first ones are taken, of one its beginning. */
#define STRETCHES(name, said, parameters, arguments, when) \
    ssize_t name parameters { \
        REAL(name); \
        enum action action = when ? step_on(said, file, 1) : GO; \
        if (action == REFUSE) return -1; \
        struct iovec first; \
        if (action != GO && count == 1) { \
            first = *stretches; \
            first.iov_len = part(action, first.iov_len); \
            stretches = &first; \
        } \
        count = part(action, count); \
        DONE(action, real arguments); \
    }
#define MANY int file, const struct iovec *stretches, int count

STRETCHES(writev, "write", (MANY), (file, stretches, count), 1)
STRETCHES(pwritev, "write", (MANY, off_t at), (file, stretches, count, at), 1)
STRETCHES(pwritev64, "write", (MANY, off64_t at), (file, stretches, count, at), 1)
STRETCHES(preadv, "read", (MANY, off_t at), (file, stretches, count, at), reads)
STRETCHES(preadv64, "read", (MANY, off64_t at), (file, stretches, count, at), reads)

#define READS(name, parameters, arguments) \
    ssize_t name parameters { \
        REAL(name); \
        enum action action = reads ? step_on("read", file, 1) : GO; \
        if (action == REFUSE) return -1; \
        count = part(action, count); \
        DONE(action, real arguments); \
    }

READS(read, (int file, void *bytes, size_t count), (file, bytes, count))
READS(pread, (int file, void *bytes, size_t count, off_t at), (file, bytes, count, at))
READS(pread64, (int file, void *bytes, size_t count, off64_t at), (file, bytes, count, at))

#define OPENS(name, parameters, last, arguments, base) \
    int name parameters { \
        REAL(name); \
        mode_t mode = 0; \
        if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { \
            va_list rest; \
            va_start(rest, last); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        int changes = flags & (O_CREAT | O_TRUNC); \
        enum action action = changes || reads ? step_at(changes ? "create" : "open", base, path, 0) : GO; \
        if (action == REFUSE) return -1; \
        DONE(action, real arguments); \
    }

OPENS(open, (const char *path, int flags, ...), flags, (path, flags, mode), AT_FDCWD)
OPENS(open64, (const char *path, int flags, ...), flags, (path, flags, mode), AT_FDCWD)
OPENS(openat, (int base, const char *path, int flags, ...), flags, (base, path, flags, mode), base)
OPENS(openat64, (int base, const char *path, int flags, ...), flags, (base, path, flags, mode), base)
