/* relay: a switch between TAP devices, where each Ethernet frame leaves one delay later.
 *
 *     relay DELAY_NS TAP TAP...
 *
 * Makes the devices in its own network namespace, says "ready", and runs until its standard
 * input ends, as it does when the program that started it is gone. How fast a link is, is the
 * work of tc, before and after the relay.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_PORTS = 64,
    MAC_BYTES = 6,
    FRAME_BYTES = 2048,       /* an MTU of 1500 and its header, with room */
    READS = 64,               /* frames from one port before another has its turn */
    QUEUE_BYTES = 256 << 20,  /* one second of 2 Gbit/s */
    EARLY_NS = 20000,         /* frames this close go at once: fewer wake-ups, no visible error */
};

struct frame {
    struct frame *next;
    uint64_t due_ns;
    int from;
    int size;
    unsigned char data[];
};

static struct pollfd polled[MOST_PORTS + 1];        /* the ports, then the standard input */
static unsigned char site_mac[MOST_PORTS][MAC_BYTES];
static int ports;
static uint64_t delay_ns;

/* All frames wait equally long, so they leave in the order in which they came. */
static struct frame *first, **end = &first;
static size_t queued_bytes;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static int make_tap(const char *name)
{
    struct ifreq request = { .ifr_flags = IFF_TAP | IFF_NO_PI };
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (device < 0 || ioctl(device, TUNSETIFF, &request) < 0) fail("/dev/net/tun");
    return device;
}

static void queue(int from, const unsigned char *data, int size, uint64_t due_ns)
{
    struct frame *frame;
    if (queued_bytes > QUEUE_BYTES || !(frame = malloc(sizeof *frame + size)))
        return;                              /* full: the newest is lost, TCP sends it again */
    *frame = (struct frame){ .due_ns = due_ns, .from = from, .size = size };
    memcpy(frame->data, data, size);
    *end = frame;
    end = &frame->next;
    queued_bytes += sizeof *frame + size;
}

static void take(int port)
{
    unsigned char data[FRAME_BYTES];
    uint64_t due_ns = now_ns() + delay_ns;
    for (int n = 0; n < READS; n++) {
        int size = read(polled[port].fd, data, sizeof data);
        if (size < 0 && errno != EAGAIN && errno != EINTR) fail("read");
        if (size < 2 * MAC_BYTES) return;
        /* One site is behind each port, so the last sender is the only one. */
        memcpy(site_mac[port], data + MAC_BYTES, MAC_BYTES);
        queue(port, data, size, due_ns);
    }
}

static int port_of(const unsigned char *mac)
{
    for (int port = 0; port < ports; port++)
        if (!memcmp(site_mac[port], mac, MAC_BYTES)) return port;
    return -1;
}

static void pass_on(const struct frame *frame)
{
    int to = port_of(frame->data);           /* -1: a broadcast, or for a site not heard yet */
    for (int port = 0; port < ports; port++)
        if (port != frame->from && (port == to || to < 0))
            if (write(polled[port].fd, frame->data, frame->size) < 0)
                continue;                    /* a device that is down loses it, as a cable would */
}

static void pass_on_due(uint64_t until_ns)
{
    while (first && first->due_ns <= until_ns) {
        struct frame *frame = first;
        pass_on(frame);
        queued_bytes -= sizeof *frame + frame->size;
        first = frame->next;
        if (!first) end = &first;
        free(frame);
    }
}

static void wait_for_something(void)
{
    uint64_t now = now_ns();
    uint64_t wait_ns = first && first->due_ns > now ? first->due_ns - now : 0;
    struct timespec wait = { wait_ns / 1000000000ull, wait_ns % 1000000000ull };
    if (ppoll(polled, ports + 1, first ? &wait : NULL, NULL) < 0 && errno != EINTR) fail("ppoll");
}

static void be_prompt(void)
{
    struct sched_param lowest = { .sched_priority = 1 };
    prctl(PR_SET_TIMERSLACK, 1);
    /* A cable does not wait for the sites to stop computing; if refused, it is less exact. */
    sched_setscheduler(0, SCHED_FIFO, &lowest);
}

int main(int argc, char **argv)
{
    ports = argc - 2;
    if (ports < 1 || ports > MOST_PORTS) {
        fprintf(stderr, "relay DELAY_NS TAP... (at most %d)\n", MOST_PORTS);
        return 2;
    }
    delay_ns = strtoull(argv[1], NULL, 10);
    for (int port = 0; port < ports; port++)
        polled[port] = (struct pollfd){ .fd = make_tap(argv[port + 2]), .events = POLLIN };
    polled[ports] = (struct pollfd){ .fd = STDIN_FILENO, .events = POLLIN };
    be_prompt();
    puts("ready");
    fflush(stdout);
    while (!polled[ports].revents) {
        for (int port = 0; port < ports; port++)
            if (polled[port].revents) take(port);
        pass_on_due(now_ns() + EARLY_NS);
        wait_for_something();
    }
    return 0;
}
