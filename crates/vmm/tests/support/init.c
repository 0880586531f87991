// The guest of the driver's tests: a PID 1 that needs no disk contents and no other program.
// It loads the modules the initramfs lists, counts up, and answers one-line commands on the agent port.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <linux/vm_sockets.h>

static volatile unsigned long counter;

static void *count(void *unused) {
    (void)unused;
    for (;;) {
        counter++;
        usleep(10000);
    }
}

static void *flood(void *unused) {
    (void)unused;
    static char line[4096];
    memset(line, 'x', sizeof line);
    for (;;)
        if (write(1, line, sizeof line) < 0)
            usleep(1000);
}

static void load_modules(void) {
    FILE *order = fopen("/modules/order", "r");
    char name[256], path[300];
    while (order && fgets(name, sizeof name, order)) {
        name[strcspn(name, "\n")] = 0;
        snprintf(path, sizeof path, "/modules/%s", name);
        int fd = open(path, O_RDONLY);
        if (fd < 0 || syscall(SYS_finit_module, fd, "", 0) != 0)
            printf("init: module %s: %s\n", name, strerror(errno));
        close(fd);
    }
}

// Where the machine has no port but a socket: the listening end, else -1.
static int listen_on_socket(void) {
    int fd = socket(AF_VSOCK, SOCK_STREAM, 0);
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = 5252};
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 8) == 0)
        return fd;
    close(fd);
    return -1;
}

static int has_socket_device(void) {
    for (int number = 0; number < 16; number++) {
        char path[64], kind[16] = "";
        snprintf(path, sizeof path, "/sys/bus/virtio/devices/virtio%d/device", number);
        FILE *file = fopen(path, "r");
        if (!file)
            continue;
        int found = fgets(kind, sizeof kind, file) && strtoul(kind, 0, 16) == 19;
        fclose(file);
        if (found)
            return 1;
    }
    return 0;
}

static int open_port(int *listener) {
    for (;;) {
        if (has_socket_device() && (*listener = listen_on_socket()) >= 0)
            return accept(*listener, 0, 0);
        DIR *ports = opendir("/sys/class/virtio-ports");
        struct dirent *entry;
        while (ports && (entry = readdir(ports))) {
            char path[512], name[64] = "";
            snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
            FILE *file = fopen(path, "r");
            if (!file)
                continue;
            if (!fgets(name, sizeof name, file))
                name[0] = 0;
            fclose(file);
            if (strncmp(name, "space.agent", 11) == 0) {
                snprintf(path, sizeof path, "/dev/%s", entry->d_name);
                closedir(ports);
                return open(path, O_RDWR);
            }
        }
        if (ports)
            closedir(ports);
        usleep(2000);
    }
}

static void touch_memory(int port, size_t mib) {
    char *memory = mmap(0, mib << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < mib << 20; at += 4096)
        memory[at] = (char)(at >> 12) | 1;
    dprintf(port, "touched %zu\n", mib);
}

static void disk(int port, const char *text) {
    char block[4096] = "";
    int fd = open("/dev/vda", O_RDWR);
    if (*text) {
        snprintf(block, sizeof block, "%s", text);
        if (pwrite(fd, block, sizeof block, 0) < 0 || fsync(fd) < 0)
            snprintf(block, sizeof block, "error %s", strerror(errno));
    } else if (pread(fd, block, sizeof block, 0) < 0) {
        snprintf(block, sizeof block, "error %s", strerror(errno));
    }
    block[sizeof block - 1] = 0;
    dprintf(port, "disk %s\n", block);
    close(fd);
}

static void command(int port, char *line) {
    pthread_t thread;
    if (strcmp(line, "ping") == 0)
        dprintf(port, "pong %lu\n", counter);
    else if (strcmp(line, "flood") == 0) {
        pthread_create(&thread, 0, flood, 0);
        dprintf(port, "flooding\n");
    } else if (strncmp(line, "touch ", 6) == 0)
        touch_memory(port, strtoul(line + 6, 0, 10));
    else if (strncmp(line, "disk", 4) == 0)
        disk(port, line[4] == ' ' ? line + 5 : "");
    else if (strcmp(line, "random") == 0) {
        unsigned long value = 0;
        int fd = open("/dev/hwrng", O_RDONLY);
        ssize_t got = read(fd, &value, sizeof value);
        dprintf(port, "random %zd %lx\n", got, value);
        close(fd);
    } else if (strcmp(line, "reboot") == 0)
        reboot(RB_AUTOBOOT);
    else if (strcmp(line, "poweroff") == 0)
        reboot(RB_POWER_OFF);
    else if (strcmp(line, "panic") == 0)
        _exit(1);
    else
        dprintf(port, "unknown %s\n", line);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    mkdir("/dev", 0755);
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mount("devtmpfs", "/dev", "devtmpfs", 0, "");
    mount("proc", "/proc", "proc", 0, "");
    mount("sysfs", "/sys", "sysfs", 0, "");
    int console = open("/dev/console", O_RDWR);
    dup2(console, 0);
    dup2(console, 1);
    dup2(console, 2);
    setvbuf(stdout, 0, _IOLBF, 0);
    load_modules();
    pthread_t thread;
    pthread_create(&thread, 0, count, 0);
    int listener = -1;
    int port = open_port(&listener);
    FILE *uptime = fopen("/proc/uptime", "r");
    char text[64] = "";
    if (uptime && fgets(text, sizeof text, uptime))
        printf("init: ready at %s", text);
    dprintf(port, "ready\n");
    char line[256];
    size_t length = 0;
    for (;;) {
        ssize_t got = read(port, line + length, 1);
        if (got <= 0) { // the host went away: wait for the next connection
            length = 0;
            if (listener >= 0) {
                close(port);
                port = accept(listener, 0, 0);
                continue;
            }
            usleep(2000);
            continue;
        }
        if (line[length] == '\n') {
            line[length] = 0;
            command(port, line);
            length = 0;
        } else if (length < sizeof line - 2) {
            length++;
        }
    }
}
