// A network switch that holds every frame for a fixed delay.
//
//     delay_switch INTERFACE...
//
// It prints "ready", then reads the delay in microseconds from standard input, one number a line.
// It ends with standard input. All interfaces are in the network namespace of the process.
//
// 1. A raw socket per interface receives frames with their virtio header, so that segments of TCP
//    offload stay one frame of up to 64 KiB and unfinished checksums stay valid.
// 2. The delay counts from the kernel's arrival time, so that it includes the time until the
//    process runs. The order of frames is kept.
// 3. A frame goes to the interface from which its destination address was last seen, or to all
//    others if there is none. It passes the interface's queueing discipline.

#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

using Nanoseconds = int64_t;
constexpr Nanoseconds SECOND = 1000000000;
constexpr size_t HEADER = 10;  // sizeof(virtio_net_hdr), whose header is not valid C++
constexpr size_t LARGEST = HEADER + ETH_HLEN + 65536 + 64;
constexpr int SOCKET_BUFFER = 256 << 20;  // bytes; the kernel drops frames beyond it
constexpr int FRAMES_A_TURN = 64;         // before other interfaces and due frames get their turn

struct Frame {
    size_t source;  // the index of an interface
    size_t size;    // bytes, header included
    Nanoseconds due;
    std::unique_ptr<char[]> bytes;
};

static void fail(const std::string& what) {
    fprintf(stderr, "delay_switch: %s: %s\n", what.c_str(), strerror(errno));
    exit(1);
}

static Nanoseconds now(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

static void set_option(int socket, int level, int name, int value) {
    if (setsockopt(socket, level, name, &value, sizeof value) != 0) fail("setsockopt");
}

static int open_interface(const char* name) {
    int fd = socket(AF_PACKET, SOCK_RAW, 0);
    if (fd < 0) fail("socket");
    set_option(fd, SOL_PACKET, PACKET_VNET_HDR, 1);
    set_option(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, 1);
    set_option(fd, SOL_SOCKET, SO_RCVBUFFORCE, SOCKET_BUFFER);
    set_option(fd, SOL_SOCKET, SO_SNDBUFFORCE, SOCKET_BUFFER);
    set_option(fd, SOL_SOCKET, SO_TIMESTAMPNS, 1);
    sockaddr_ll address{};
    address.sll_family = AF_PACKET;
    address.sll_protocol = htons(ETH_P_ALL);
    address.sll_ifindex = static_cast<int>(if_nametoindex(name));
    if (address.sll_ifindex == 0) fail(name);
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fail(name);
    return fd;
}

// The time since the kernel received the message.
static Nanoseconds age(msghdr& message) {
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_TIMESTAMPNS) continue;
        timespec arrival;
        memcpy(&arrival, CMSG_DATA(c), sizeof arrival);
        Nanoseconds elapsed = now(CLOCK_REALTIME) - arrival.tv_sec * SECOND - arrival.tv_nsec;
        return std::clamp<Nanoseconds>(elapsed, 0, SECOND);  // the clock may be set meanwhile
    }
    return 0;
}

static uint64_t address_at(const char* bytes) {
    uint64_t address = 0;
    memcpy(&address, bytes, ETH_ALEN);
    return address;
}

class Switch {
public:
    explicit Switch(std::vector<int> interfaces) : interfaces_(std::move(interfaces)) {}

    void set_delay(Nanoseconds delay) { delay_ = delay; }

    void receive(size_t source) {
        for (int count = 0; count < FRAMES_A_TURN; count++) {
            Frame frame{source, 0, 0, buffer()};
            alignas(cmsghdr) char control[128];
            iovec part{frame.bytes.get(), LARGEST};
            msghdr message{};
            message.msg_iov = &part;
            message.msg_iovlen = 1;
            message.msg_control = control;
            message.msg_controllen = sizeof control;
            ssize_t size = recvmsg(interfaces_[source], &message, MSG_DONTWAIT);
            if (size < static_cast<ssize_t>(HEADER + ETH_HLEN) || message.msg_flags & MSG_TRUNC) {
                spare_.push_back(std::move(frame.bytes));
                return;
            }
            frame.size = static_cast<size_t>(size);
            last_due_ = std::max(last_due_, now(CLOCK_MONOTONIC) - age(message) + delay_);
            frame.due = last_due_;
            port_of_[address_at(frame.bytes.get() + HEADER + ETH_ALEN)] = source;
            waiting_.push_back(std::move(frame));
        }
    }

    // Send the frames that are due; the time until the next one is due, or -1 without one.
    Nanoseconds send_due() {
        while (!waiting_.empty()) {
            Nanoseconds left = waiting_.front().due - now(CLOCK_MONOTONIC);
            if (left > 0) return left;
            forward(waiting_.front());
            spare_.push_back(std::move(waiting_.front().bytes));
            waiting_.pop_front();
        }
        return -1;
    }

private:
    std::unique_ptr<char[]> buffer() {
        if (spare_.empty()) return std::make_unique<char[]>(LARGEST);
        std::unique_ptr<char[]> bytes = std::move(spare_.back());
        spare_.pop_back();
        return bytes;
    }

    void forward(const Frame& frame) {
        auto port = port_of_.find(address_at(frame.bytes.get() + HEADER));
        if (port != port_of_.end()) {
            send_to(port->second, frame);
            return;
        }
        for (size_t other = 0; other < interfaces_.size(); other++) {
            if (other != frame.source) send_to(other, frame);
        }
    }

    // Blocks while the interface's queue is full. A frame that it refuses is lost, as on a link.
    void send_to(size_t port, const Frame& frame) {
        (void)!send(interfaces_[port], frame.bytes.get(), frame.size, 0);
    }

    std::vector<int> interfaces_;
    Nanoseconds delay_ = 0, last_due_ = 0;
    std::deque<Frame> waiting_;
    std::vector<std::unique_ptr<char[]>> spare_;
    std::unordered_map<uint64_t, size_t> port_of_;
};

// A link does not wait for a processor; ranks that compute must not hold frames up.
static void run_before_others() {
    sched_param parameters{};
    parameters.sched_priority = 1;
    if (sched_setscheduler(0, SCHED_FIFO, &parameters) != 0) setpriority(PRIO_PROCESS, 0, -20);
    prctl(PR_SET_TIMERSLACK, 1);
}

int main(int argc, char** argv) {
    std::vector<int> interfaces;
    std::vector<pollfd> polled{{STDIN_FILENO, POLLIN, 0}};
    for (int i = 1; i < argc; i++) {
        interfaces.push_back(open_interface(argv[i]));
        polled.push_back({interfaces.back(), POLLIN, 0});
    }
    run_before_others();
    puts("ready");
    fflush(stdout);
    Switch network(interfaces);
    while (true) {
        Nanoseconds left = network.send_due();
        timespec timeout{left / SECOND, left % SECOND};
        if (ppoll(polled.data(), polled.size(), left < 0 ? nullptr : &timeout, nullptr) < 0) {
            fail("ppoll");
        }
        if (polled[0].revents != 0) {
            char line[64];
            ssize_t size = read(STDIN_FILENO, line, sizeof line - 1);
            if (size <= 0) return 0;
            line[size] = 0;
            network.set_delay(static_cast<Nanoseconds>(1000 * atof(line)));
        }
        for (size_t i = 1; i < polled.size(); i++) {
            if (polled[i].revents != 0) network.receive(i - 1);
        }
    }
}
