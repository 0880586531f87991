//! The messages a guest sends inside its link, and those the daemon in it takes.

use prost::Message;
use space_proto::codec::{self, FIELDS_MAX};
use space_proto::guest::{
    AttachInput, AttachOpen, AttachOutput, AttachStarted, Exit, FileChunk, FileStat, Hello, HelloAck, InfoReply,
    ListDirReply, ListProcessesReply, OutputChunk, ProcessInfo, ProcessSpec, PtySize, QuiesceReply, RefreshReply,
    RefreshRequest, WriteArchiveReply, WriteFileChunk, attach_input, attach_output,
};

use crate::{Seed, choose};

fn check<M: Message + Default + PartialEq + std::fmt::Debug>(data: &[u8]) -> Option<M> {
    let message: M = codec::decode(data).ok()?;
    let own = message.encode_to_vec();
    // Only a negative number that was sent short grows.
    assert!(own.len() <= 2 * data.len(), "{} bytes became {}", data.len(), own.len());
    let again: M = codec::decode(&own).expect("its own encoding");
    assert!(again == message, "{message:?} became {again:?}");
    Some(message)
}

/// A message that is taken is the same after a round trip and has no more elements than the bound.
pub fn messages(data: &[u8]) {
    let (choice, data) = choose(data);
    match choice % 13 {
        0 => drop(check::<HelloAck>(data)),
        1 => drop(check::<InfoReply>(data)),
        2 => drop(check::<RefreshReply>(data)),
        3 => drop(check::<QuiesceReply>(data)),
        4 => drop(check::<ProcessInfo>(data)),
        5 => {
            let list: Option<ListProcessesReply> = check(data);
            assert!(list.is_none_or(|list| list.processes.len() <= FIELDS_MAX));
        }
        6 => drop(check::<AttachOutput>(data)),
        7 => drop(check::<FileStat>(data)),
        8 => {
            let list: Option<ListDirReply> = check(data);
            assert!(list.is_none_or(|list| list.entries.len() <= FIELDS_MAX));
        }
        9 => drop(check::<FileChunk>(data)),
        10 => drop(check::<WriteArchiveReply>(data)),
        11 => drop(check::<Hello>(data)),
        _ => {
            drop(check::<AttachInput>(data));
            drop(check::<WriteFileChunk>(data));
        }
    }
}

fn of(name: &str, choice: u8, message: &impl Message) -> Seed {
    let mut content = vec![choice];
    message.encode(&mut content).expect("in memory");
    (name.to_owned(), content)
}

pub fn seeds() -> Vec<Seed> {
    let refresh =
        RefreshReply { realtime_ns: 1_700_000_000_000_000_000, boot_id: "b".repeat(36), ..Default::default() };
    let spec = ProcessSpec {
        argv: vec!["sh".to_owned(), "-c".to_owned(), "true".to_owned()],
        env: [("LANG".to_owned(), "C".to_owned())].into(),
        pty: Some(PtySize { cols: 80, rows: 24 }),
        ..ProcessSpec::default()
    };
    let exit = Exit { reason: 2, code: 137, signal: 9, message: "killed".to_owned() };
    let process = ProcessInfo {
        process_id: "cmd-0".to_owned(),
        state: 3,
        spec: Some(spec),
        pid: 7,
        started_unix_ms: -1,
        exit: Some(exit.clone()),
        output_end: 99,
        ..ProcessInfo::default()
    };
    let stat = FileStat { path: "/etc/hosts".to_owned(), kind: 1, size: 5, mode: 0o644, ..FileStat::default() };
    let started = AttachStarted { process: Some(process.clone()) };
    let output = |kind| AttachOutput { kind: Some(kind) };
    let chunk = OutputChunk { stream: 1, offset: 3, data: (&b"hello\n"[..]).into() };
    let open = AttachOpen { process_id: "cmd-0".to_owned(), offset: 1, ..AttachOpen::default() };
    let hello = RefreshRequest { hostname: "box".to_owned(), entropy: vec![1; 64].into(), ..RefreshRequest::default() };
    let many = ListProcessesReply { processes: vec![ProcessInfo::default(); FIELDS_MAX + 1] };
    vec![
        of("ack", 0, &HelloAck { protocol: 1, refresh: Some(refresh.clone()), error: String::new() }),
        of("refusal", 0, &HelloAck { protocol: 1, refresh: None, error: "the clock".to_owned() }),
        of("info", 1, &InfoReply { protocol: 1, kernel: "6.1".to_owned(), processes: 2, ..InfoReply::default() }),
        of("refresh", 2, &refresh),
        of("quiesce", 3, &QuiesceReply { frozen_processes: 3, ..Default::default() }),
        of("process", 4, &process),
        of("processes", 5, &ListProcessesReply { processes: vec![process; 2] }),
        of("processes_many", 5, &many),
        of("started", 6, &output(attach_output::Kind::Started(started))),
        of("output", 6, &output(attach_output::Kind::Output(chunk))),
        of("exit", 6, &output(attach_output::Kind::Exit(exit))),
        of("stat", 7, &stat),
        of("folder", 8, &ListDirReply { entries: vec![stat.clone(); 3], more: true }),
        of("chunk", 9, &FileChunk { stat: Some(stat), data: vec![0; 40].into() }),
        of("written", 10, &WriteArchiveReply { entries: 1, bytes: 2 }),
        of("hello", 11, &Hello { protocol: 1, refresh: Some(hello), ..Hello::default() }),
        of("attach", 12, &AttachInput { kind: Some(attach_input::Kind::Open(open)) }),
    ]
}
