//! Programs on a terminal: size, control characters, job control.

mod common;

use common::*;
use space_proto::guest::attach_input::Kind as In;
use space_proto::guest::*;

fn on_terminal(script: &str, cols: u32, rows: u32) -> ProcessSpec {
    ProcessSpec { pty: Some(PtySize { cols, rows }), stdin: true, ..sh(script) }
}

#[tokio::test]
async fn the_size_is_right_from_the_start_and_follows() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    assert_eq!(
        run(&mut client, on_terminal("stty size; tty -s && echo tty; echo $TERM", 132, 43)).await.text(),
        "43 132\r\ntty\r\nxterm-256color\r\n"
    );
    let script = "trap 'stty size; exit 6' WINCH; echo ready; while :; do sleep 0.02; done";
    let mut attached = Attached::run(&mut client, on_terminal(script, 80, 24)).await;
    attached.until("ready").await;
    attached.send(In::Resize(PtySize { cols: 99, rows: 33 })).await;
    attached.until("33 99").await;
    assert_eq!(attached.finish().await.code(), 6);
}

#[tokio::test]
async fn control_c_and_control_d_work() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    // A shell may lose it while it starts a program: what gets it here is the program itself, which has answered once.
    let mut attached = Attached::run(&mut client, on_terminal("exec cat", 80, 24)).await;
    attached.write("ready\n").await;
    attached.until("ready\r\nready").await;
    attached.write("\x03").await;
    let seen = attached.finish().await;
    assert_eq!(seen.code(), 130, "{seen:?}");
    let attached = Attached::run(&mut client, on_terminal("cat; echo over", 80, 24)).await;
    attached.write("text\n").await;
    attached.send(In::CloseStdin(true)).await;
    let seen = attached.finish().await;
    assert!(seen.text().ends_with("over\r\n") && seen.code() == 0, "{seen:?}");
}

#[tokio::test]
async fn the_terminal_controls_the_session() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let script = "ps -o tty= -p $$; ps -o sid=,pgid=,pid= -p $$; : > /dev/tty && echo opened";
    let seen = run(&mut client, on_terminal(script, 80, 24)).await;
    let text = seen.text();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    assert!(lines[0].starts_with("pts/"), "{text}");
    let ids: Vec<&str> = lines[1].split_whitespace().collect();
    assert!(ids[0] == ids[1] && ids[1] == ids[2], "{text}");
    assert_eq!(lines[2], "opened");
}

#[tokio::test]
async fn a_terminal_can_be_used_by_the_user_it_belongs_to() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let spec = ProcessSpec { user: "daemon".into(), ..on_terminal("id -un; echo again > $(tty) && echo well", 80, 24) };
    let seen = run(&mut client, spec).await;
    assert_eq!(seen.text(), "daemon\r\nagain\r\nwell\r\n");
}

#[tokio::test]
async fn a_child_that_keeps_the_terminal_does_not_keep_the_exit() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let script = "trap '' HUP; sleep 1000 & echo fore; exit 9";
    let seen = run(&mut client, on_terminal(script, 80, 24)).await;
    assert_eq!((seen.text().as_str(), seen.code()), ("fore\r\n", 9));
}

#[tokio::test]
async fn fast_exits_on_a_terminal_lose_nothing() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    for n in 0..100 {
        let seen = run(&mut client, on_terminal(&format!("echo line {n}; exit {}", n % 7), 80, 24)).await;
        assert_eq!((seen.text(), seen.code()), (format!("line {n}\r\n"), n % 7));
    }
}
