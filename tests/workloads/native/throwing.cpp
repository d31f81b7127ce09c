// C++ exceptions: work before the throw, in a destructor that runs on the way (a landing pad of its function), and in the catch block.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <semaphore.h>
#include <stdexcept>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#define CHAIN __attribute__((noipa))

namespace throwing {

static std::atomic<bool> stopping;
static sem_t started;
static int thread_id;
static volatile unsigned sink;

static inline __attribute__((always_inline)) unsigned busy(unsigned x)
{
    for (int i = 0; i < 100000; i++) {
        x = x * 31 + static_cast<unsigned>(i);
        __asm__ volatile("" : "+r"(x)); // keeps the loop as it is written
    }
    return x;
}

CHAIN unsigned before_throw(unsigned x) { return busy(x) | 1; }
CHAIN unsigned while_unwinding(unsigned x) { return busy(x) + 1; }
CHAIN unsigned in_catch(unsigned x) { return busy(x) + 2; }

struct Guard {
    CHAIN ~Guard() { sink += while_unwinding(sink) + 1; }
};

CHAIN unsigned thrower(unsigned x)
{
    if (before_throw(x) != 0)
        throw std::runtime_error("thrown");
    return 1;
}

CHAIN unsigned middle(unsigned x)
{
    Guard guard;
    return thrower(x) + 1;
}

CHAIN unsigned catcher(unsigned x)
{
    unsigned sum = 0;
    try {
        sum += middle(x);
    } catch (const std::runtime_error &) {
        sum += in_catch(x) + 1;
    }
    return sum + 1;
}

CHAIN void loop()
{
    while (!stopping)
        sink += catcher(sink);
}

} // namespace throwing

int main()
{
    using namespace throwing;
    sem_init(&started, 0, 0);
    std::thread thread([] {
        thread_id = static_cast<int>(syscall(SYS_gettid));
        sem_post(&started);
        loop();
    });
    sem_wait(&started);
    std::printf("ready {\"thrower\":%d,\"chains\":{\"thrower\":["
                "[\"throwing::loop\",\"throwing::catcher\",\"throwing::middle\",\"throwing::thrower\",\"throwing::before_throw\"],"
                "[\"throwing::loop\",\"throwing::catcher\",\"throwing::middle\",\"throwing::Guard::~Guard\",\"throwing::while_unwinding\"],"
                "[\"throwing::loop\",\"throwing::catcher\",\"throwing::in_catch\"]]}}\n", thread_id);
    std::fflush(stdout);
    char line[100];
    while (std::fgets(line, sizeof line, stdin) && std::strcmp(line, "stop\n") != 0) {
    }
    stopping = true;
    thread.join();
    std::printf("truth {}\n");
}
