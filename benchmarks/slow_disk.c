/* Delays and counts the file operations of a process below one folder, as if it were on a slow shared file system.
   Preloaded with LD_PRELOAD; SLOW_FOLDER is the folder, SLOW_MICROSECONDS the delay of each operation, and SLOW_COUNT
   the file to which the number of operations is added at the end. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static long count;

/* otherwise, a sleep lasts 50 us longer; threads inherit it */
__attribute__((constructor)) static void sleep_exactly(void) { prctl(PR_SET_TIMERSLACK, 1L); }

static void delay(const char *path) {
    static const char *folder;
    static long wait;
    if (folder == NULL) {
        const char *given = getenv("SLOW_MICROSECONDS");
        wait = given == NULL ? 0 : atol(given) * 1000;
        folder = getenv("SLOW_FOLDER");
        folder = folder == NULL ? "\n" : folder;
    }
    if (path == NULL || strncmp(path, folder, strlen(folder)) != 0)
        return;
    __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
    if (wait) {
        struct timespec pause = {wait / 1000000000L, wait % 1000000000L};
        nanosleep(&pause, NULL);
    }
}

__attribute__((destructor)) static void report(void) {
    const char *path = getenv("SLOW_COUNT");
    FILE *file = path == NULL || count == 0 ? NULL : fopen(path, "a");
    if (file != NULL) {
        fprintf(file, "%ld\n", count);
        fclose(file);
    }
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;                                      \
        va_end(more);                                                                                                  \
        delay(path);                                                                                                   \
        return NEXT(name)(path, flags, mode);                                                                          \
    }

#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                                           \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;                                      \
        va_end(more);                                                                                                  \
        delay(path);                                                                                                   \
        return NEXT(name)(folder, path, flags, mode);                                                                  \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int stat(const char *path, struct stat *found) {
    delay(path);
    return NEXT(stat)(path, found);
}

int stat64(const char *path, struct stat64 *found) {
    delay(path);
    return NEXT(stat64)(path, found);
}

int lstat(const char *path, struct stat *found) {
    delay(path);
    return NEXT(lstat)(path, found);
}

int lstat64(const char *path, struct stat64 *found) {
    delay(path);
    return NEXT(lstat64)(path, found);
}

int fstatat(int folder, const char *path, struct stat *found, int flags) {
    delay(path);
    return NEXT(fstatat)(folder, path, found, flags);
}

int fstatat64(int folder, const char *path, struct stat64 *found, int flags) {
    delay(path);
    return NEXT(fstatat64)(folder, path, found, flags);
}

int access(const char *path, int mode) {
    delay(path);
    return NEXT(access)(path, mode);
}

ssize_t readlink(const char *path, char *target, size_t size) {
    delay(path);
    return NEXT(readlink)(path, target, size);
}

DIR *opendir(const char *path) {
    delay(path);
    return NEXT(opendir)(path);
}
