/* The `dotnet` command of a root whose C library is musl: the packages that the tests' roots are made of have none for it.
   It hands its command line to the root's one libhostfxr.so, whose entry points are stable. */
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef int startup(int argc, const char **argv, const char *host, const char *root, const char *app);

int main(int argc, const char **argv) {
    char host[PATH_MAX] = {0}, root[PATH_MAX], app[PATH_MAX + 4], pattern[PATH_MAX + 32];
    if (readlink("/proc/self/exe", host, sizeof host - 1) < 0) {
        perror("/proc/self/exe");
        return 1;
    }
    strcpy(root, host);
    *strrchr(root, '/') = 0;
    /* As Microsoft's own command does: with a file of this name beside it, it would be that application's host. */
    snprintf(app, sizeof app, "%s.dll", host);
    snprintf(pattern, sizeof pattern, "%s/host/fxr/*/libhostfxr.so", root);
    glob_t found;
    if (glob(pattern, 0, NULL, &found)) {
        fprintf(stderr, "no %s\n", pattern);
        return 1;
    }
    void *library = dlopen(found.gl_pathv[0], RTLD_LAZY);
    startup *begin = library ? (startup *)dlsym(library, "hostfxr_main_startupinfo") : NULL;
    if (!begin) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    return begin(argc, argv, host, root, app);
}
