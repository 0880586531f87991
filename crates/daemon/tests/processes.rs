//! Starting, ending, signalling, and the exit of processes.

mod common;

use std::time::Duration;

use common::*;
use space_proto::guest::attach_input::Kind as In;
use space_proto::guest::*;
use tonic::Code;

#[tokio::test]
async fn a_thousand_fast_exits_give_their_exact_bytes_and_codes() {
    let daemon = Daemon::start();
    let client = daemon.client().await;
    let workers: Vec<_> = (0..8u32)
        .map(|worker| {
            let mut client = client.clone();
            tokio::spawn(async move {
                for n in 0..125u32 {
                    let code = (worker * 125 + n) % 256;
                    let size = [0, 1, 100, 4096, 65_536, 65_537, 300_000][(n % 7) as usize];
                    let script = format!("head -c {size} /dev/zero; printf e{n} >&2; exit {code}");
                    let seen = run(&mut client, sh(&script)).await;
                    assert_eq!((seen.code(), seen.reason()), (code as i32, ExitReason::ExitedNormally));
                    assert_eq!((seen.stdout.len(), seen.dropped), (size, None));
                    assert_eq!(seen.stderr, format!("e{n}").as_bytes());
                    if n % 30 == 29 {
                        // Ended ones are kept for long; none of this needs them.
                        assert!(
                            !client
                                .list_processes(ListProcessesRequest {})
                                .await
                                .unwrap()
                                .into_inner()
                                .processes
                                .is_empty()
                        );
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let cases = [
        (spec(&["no-such-program"]), 127, "no-such-program"),
        (spec(&["/etc/passwd"]), 126, "/etc/passwd"),
        (ProcessSpec { workdir: "/nowhere".into(), ..sh("true") }, 126, "/nowhere"),
    ];
    for (spec, code, word) in cases {
        let seen = run(&mut client, spec).await;
        let exit = seen.exit.clone().unwrap();
        assert_eq!((seen.reason(), exit.code), (ExitReason::StartFailed, code), "{}", exit.message);
        assert!(exit.message.contains(word), "{}", exit.message);
    }
    let unknown = ProcessSpec { user: "nobody-of-that-name".into(), ..sh("true") };
    let request = ReserveRequest { process_id: new_id(), spec: Some(unknown), expires_ms: 0 };
    let refused = client.reserve(request).await.unwrap_err();
    assert!(refused.message().contains("nobody-of-that-name"), "{refused}");
    for bad in
        [spec(&[]), spec(&[""]), spec(&["a\0b"]), ProcessSpec { env: [("A=B".into(), "x".into())].into(), ..sh("") }]
    {
        let request = ReserveRequest { process_id: new_id(), spec: Some(bad), expires_ms: 0 };
        assert_eq!(client.reserve(request).await.unwrap_err().code(), Code::InvalidArgument);
    }
}

#[tokio::test]
async fn environment_user_and_folder_come_from_the_spec_above_the_defaults() {
    let daemon = Daemon::start();
    let defaults = Defaults {
        user: "daemon".into(),
        workdir: "/usr".into(),
        env: [("A".into(), "1".into()), ("B".into(), "1".into())].into(),
    };
    let refresh = RefreshRequest {
        env: [("B".into(), "2".into()), ("C".into(), "2".into())].into(),
        defaults: Some(defaults),
        ..Default::default()
    };
    let mut client = daemon.client_with(refresh).await;
    let wanted = ProcessSpec {
        env: [("C".into(), "3".into())].into(),
        ..sh("echo $A$B$C $USER $PWD; id -u; cat /proc/self/oom_score_adj")
    };
    assert_eq!(run(&mut client, wanted).await.text(), "123 daemon /usr\n1\n0\n");
    let wanted =
        ProcessSpec { user: "0:0".into(), workdir: "/tmp".into(), ..sh("echo $HOME $PWD; id -G; env | wc -l") };
    let text = run(&mut client, wanted).await.text();
    assert!(text.starts_with("/root /tmp\n0\n"), "{text}");
    let umask = run(&mut client, sh("umask; ulimit -c; ls /proc/self/fd | wc -l")).await.text();
    assert_eq!(umask, "0022\n0\n4\n", "the mask, core files, or descriptors that leaked");
}

#[tokio::test]
async fn reserving_is_idempotent_and_ids_are_not_shared() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let request = |script: &str| ReserveRequest { process_id: "one".into(), spec: Some(sh(script)), expires_ms: 0 };
    client.reserve(request("echo a")).await.unwrap();
    client.reserve(request("echo a")).await.unwrap();
    assert_eq!(client.reserve(request("echo b")).await.unwrap_err().code(), Code::AlreadyExists);
    let started = client.start(ProcessRef { process_id: "one".into() }).await.unwrap().into_inner();
    assert_ne!(started.pid, 0);
    let ended = info(&mut client, "one", PATIENCE).await;
    assert_eq!((ended.state(), ended.exit.unwrap().code), (ProcessState::Exited, 0));
    client.start(ProcessRef { process_id: "one".into() }).await.unwrap();
    assert_eq!(Attached::to(&mut client, "one", 0).await.finish().await.text(), "a\n");
    let unknown = client.start(ProcessRef { process_id: "two".into() }).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

#[tokio::test]
async fn a_reservation_that_nobody_takes_expires() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let request = ReserveRequest { process_id: "late".into(), spec: Some(sh("true")), expires_ms: 100 };
    client.reserve(request).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let error = client.start(ProcessRef { process_id: "late".into() }).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
}

#[tokio::test]
async fn signals_reach_the_whole_process_group() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let mut attached =
        Attached::run(&mut client, sh("sleep 1000 & echo $!; sleep 1000 & echo $!; wait; echo woken")).await;
    attached.until("\n").await;
    while attached.seen.text().lines().count() < 2 {
        assert!(attached.step().await);
    }
    let children: Vec<u32> = attached.seen.text().lines().map(|l| l.parse().unwrap()).collect();
    attached.send(In::Signal(15)).await;
    let seen = attached.finish().await;
    assert_eq!((seen.reason(), seen.code()), (ExitReason::Signaled, 143));
    eventually("the children ended too", || !children.iter().any(|pid| is_alive(*pid))).await;

    let mut trap =
        Attached::run(&mut client, sh("trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.01; done")).await;
    trap.until("ready").await;
    trap.send(In::Signal(10)).await;
    let seen = trap.finish().await;
    assert_eq!((seen.text().as_str(), seen.code()), ("ready\ngot\n", 5));
}

#[tokio::test]
async fn signals_that_make_no_sense_are_refused() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let id = reserve(&mut client, sh("sleep 1000")).await;
    client.start(ProcessRef { process_id: id.clone() }).await.unwrap();
    for signal in [0, -1, 65, 1000] {
        let request = SignalRequest { process_id: id.clone(), signal, kill_tree: false };
        assert_eq!(client.signal(request).await.unwrap_err().code(), Code::InvalidArgument, "{signal}");
    }
    let request = SignalRequest { process_id: id.clone(), signal: 9, kill_tree: true };
    client.signal(request).await.unwrap();
    let exit = info(&mut client, &id, PATIENCE).await.exit.unwrap();
    assert_eq!((exit.reason(), exit.signal, exit.code), (ExitReason::Signaled, 9, 137));
}

#[tokio::test]
async fn a_timeout_ends_what_the_process_started_too() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let limited = ProcessSpec { timeout_ms: 500, ..sh("sleep 1000 & echo $!; wait") };
    let seen = run(&mut client, limited).await;
    assert_eq!(seen.reason(), ExitReason::Timeout);
    assert!(seen.code() > 0);
    let child: u32 = seen.text().trim().parse().unwrap();
    eventually("the child ended too", || !is_alive(child)).await;
    let quick = ProcessSpec { timeout_ms: 60_000, ..sh("exit 3") };
    assert_eq!(run(&mut client, quick).await.reason(), ExitReason::ExitedNormally);
}

#[tokio::test]
async fn children_in_the_background_hold_nothing_back() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let scripts = [
        "echo fore; sleep 1000 &",
        "echo fore; nohup sleep 1000 >/dev/null 2>&1 &",
        "echo fore; (sleep 1000 &) ; exit 0",
        "echo fore; setsid sleep 1000 & exit 0",
    ];
    for script in scripts {
        let start = std::time::Instant::now();
        let seen = run(&mut client, sh(script)).await;
        assert_eq!((seen.text().as_str(), seen.code()), ("fore\n", 0), "{script}");
        assert!(start.elapsed() < Duration::from_secs(20), "{script}");
    }
    // One that writes on and on does not hold it back either, and is heard by who attaches later.
    let id = reserve(&mut client, sh("echo fore; (while :; do echo back; sleep 0.05; done) & exit 4")).await;
    let seen = Attached::to(&mut client, &id, 0).await.finish().await;
    assert!(seen.text().starts_with("fore\n") && seen.code() == 4, "{seen:?}");
    let (mut end, start) = (seen.offset, std::time::Instant::now());
    while end == seen.offset {
        assert!(start.elapsed() < PATIENCE, "what the child wrote later was not kept");
        end = info(&mut client, &id, Duration::ZERO).await.output_end;
    }
    let later = Attached::to(&mut client, &id, seen.offset).await.finish().await;
    assert!(later.text().contains("back") && later.code() == 4);
}

#[tokio::test]
async fn five_thousand_orphans_leave_no_zombie_and_take_no_exit_code() {
    let daemon = Daemon::start();
    let client = daemon.client().await;
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move {
                for n in 0..25 {
                    // Each inner shell ends before its child does.
                    let script = format!("i=0; while [ $i -lt 50 ]; do ( : & ) ; i=$((i+1)); done; exit {n}");
                    assert_eq!(run(&mut client, sh(&script)).await.code(), n);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    eventually("no child is left", || descendants(daemon.pid()).is_empty()).await;
}

#[tokio::test]
async fn standard_input_in_all_its_ways() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    // Not asked for: at its end from the start.
    assert_eq!(run(&mut client, sh("cat; echo end")).await.text(), "end\n");
    // Sent and closed; binary.
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let attached = Attached::run(&mut client, ProcessSpec { stdin: true, ..spec(&["cat"]) }).await;
    attached.write(bytes.clone()).await;
    attached.send(In::CloseStdin(true)).await;
    assert_eq!(attached.finish().await.stdout, bytes);
    // Never closed, and not read.
    let attached = Attached::run(&mut client, ProcessSpec { stdin: true, ..sh("echo done") }).await;
    attached.write("ignored").await;
    assert_eq!(attached.finish().await.text(), "done\n");
    // Half read, then the reader ends.
    let mut attached = Attached::run(&mut client, ProcessSpec { stdin: true, ..sh("head -n 1; exit 2") }).await;
    attached.write(format!("line\n{}", "x".repeat(300_000))).await;
    attached.until("line").await;
    attached.send(In::CloseStdin(true)).await;
    assert_eq!(attached.finish().await.code(), 2);
    // Two may write.
    let id = reserve(&mut client, ProcessSpec { stdin: true, ..spec(&["cat"]) }).await;
    let mut first = Attached::to(&mut client, &id, 0).await;
    first.write("a").await;
    first.until("a").await;
    let second = Attached::to(&mut client, &id, 0).await;
    second.write("b").await;
    first.until("ab").await;
    second.send(In::CloseStdin(true)).await;
    assert_eq!((first.finish().await.text(), second.finish().await.text()), ("ab".into(), "ab".into()));
}

#[tokio::test]
async fn a_large_input_waits_for_a_slow_program_and_loses_nothing() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let attached = Attached::run(&mut client, ProcessSpec { stdin: true, ..sh("sleep 1; wc -c") }).await;
    let chunk = vec![7u8; 64 * 1024];
    for _ in 0..320 {
        attached.write(chunk.clone()).await;
    }
    attached.send(In::CloseStdin(true)).await;
    assert_eq!(attached.finish().await.text().trim(), (320 * 64 * 1024).to_string());
}

#[tokio::test]
async fn attachments_that_are_torn_off_leave_the_daemon_well() {
    let daemon = Daemon::start();
    let client = daemon.client().await;
    let workers: Vec<_> = (0..8u64)
        .map(|worker| {
            let mut client = client.clone();
            tokio::spawn(async move {
                for n in 0..60u64 {
                    let id = reserve(&mut client, sh("echo x; sleep 0.01; echo y")).await;
                    let attach = Attached::to(&mut client, &id, 0);
                    // Sometimes before the answer, sometimes after.
                    let _ = tokio::time::timeout(Duration::from_micros((worker * 61 + n * 97) % 6000), attach).await;
                    client.start(ProcessRef { process_id: id.clone() }).await.unwrap();
                    let ended = info(&mut client, &id, PATIENCE).await;
                    assert_eq!(ended.exit.unwrap().code, 0);
                    assert_eq!(Attached::to(&mut client, &id, 0).await.finish().await.text(), "x\ny\n");
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
}

#[tokio::test]
async fn too_many_processes_are_refused_and_the_rest_go_on() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let mut refused = None;
    for n in 0..2000 {
        let request = ReserveRequest { process_id: format!("r{n}"), spec: Some(sh("echo on")), expires_ms: 60_000 };
        if let Err(error) = client.reserve(request).await {
            refused = Some(error);
            break;
        }
    }
    assert_eq!(refused.expect("there is no limit").code(), Code::ResourceExhausted);
    assert_eq!(Attached::to(&mut client, "r0", 0).await.finish().await.text(), "on\n");
}

#[tokio::test]
async fn a_list_of_large_commands_fits_into_an_answer() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    for _ in 0..60 {
        let large = ProcessSpec { env: [("BIG".into(), "x".repeat(100_000))].into(), ..sh("true") };
        reserve(&mut client, large).await;
    }
    let listed = client.list_processes(ListProcessesRequest {}).await.unwrap().into_inner();
    assert_eq!(listed.processes.len(), 60);
}
