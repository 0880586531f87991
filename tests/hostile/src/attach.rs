//! What clients send: frames of the attach WebSocket and bodies of the API.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use space_api::frame::{Frame, STDIN_MAX_BYTES};
use space_api::problem::{Code, Problem};
use space_api::{
    BuildTemplate, CreateCommand, CreateKey, CreateSandbox, Exit, MakeDirectory, PatchSandbox, Process, RenameFile,
    SendSignal, TagTemplate, TerminalSize,
};

use crate::{Seed, choose, seed};

/// A frame that is taken is the same after a round trip; one without JSON in it byte for byte.
pub fn frames(data: &[u8]) {
    let Ok(frame) = Frame::decode(Bytes::copy_from_slice(data)) else { return };
    let own = frame.encode();
    if let Frame::Stdin(input) = &frame {
        assert!(input.len() <= STDIN_MAX_BYTES);
    }
    if !matches!(frame, Frame::Exit(_) | Frame::Started(_) | Frame::Error(_)) {
        assert_eq!(own, data);
    }
    assert_eq!(Frame::decode(own.clone()).expect("its own encoding").encode(), own);
}

pub fn frame_seeds() -> Vec<Seed> {
    let data = Bytes::from_static(b"\xff\x00hi");
    let process = Process {
        id: "cmd-0".to_owned(),
        state: "running".to_owned(),
        argv: vec!["sh".to_owned()],
        user: "user".to_owned(),
        workdir: "/".to_owned(),
        terminal: true,
        pid: 7,
        started_at_ms: Some(1),
        ended_at_ms: None,
        exit: None,
        output_start: 0,
        output_end: 3,
        attached: 1,
    };
    let exit = Exit { reason: "exited".to_owned(), code: 7, signal: None, message: Some("gone".to_owned()) };
    let frames = [
        ("stdout", Frame::Stdout { offset: 7, data: data.clone() }),
        ("stderr", Frame::Stderr { offset: u64::MAX, data: Bytes::new() }),
        ("stdin", Frame::Stdin(data)),
        ("close", Frame::CloseStdin),
        ("resize", Frame::Resize(TerminalSize { cols: 80, rows: 24 })),
        ("signal", Frame::Signal(15)),
        ("exit", Frame::Exit(exit)),
        ("dropped", Frame::Dropped { until: 3 }),
        ("started", Frame::Started(Box::new(process))),
        ("error", Frame::Error(Problem::new(Code::Gone, "gone"))),
    ];
    frames.into_iter().map(|(name, frame)| seed(name, frame.encode())).collect()
}

fn body<T: Serialize + DeserializeOwned>(data: &[u8]) {
    let Ok(body) = serde_json::from_slice::<T>(data) else { return };
    let own = serde_json::to_vec(&body).expect("plain data");
    let again: T = serde_json::from_slice(&own).expect("its own encoding");
    assert_eq!(serde_json::to_vec(&again).expect("plain data"), own);
}

/// A body that is taken is the same after a round trip.
pub fn bodies(data: &[u8]) {
    let (choice, data) = choose(data);
    match choice % 9 {
        0 => body::<CreateSandbox>(data),
        1 => body::<PatchSandbox>(data),
        2 => body::<CreateCommand>(data),
        3 => body::<SendSignal>(data),
        4 => body::<MakeDirectory>(data),
        5 => body::<RenameFile>(data),
        6 => body::<BuildTemplate>(data),
        7 => body::<TagTemplate>(data),
        _ => body::<CreateKey>(data),
    }
}

pub fn body_seeds() -> Vec<Seed> {
    let create = CreateSandbox { template: "seed".to_owned(), ttl_seconds: Some(60), ..CreateSandbox::default() };
    let command = CreateCommand { argv: vec!["true".to_owned()], stdin: true, ..CreateCommand::default() };
    let of = |name: &str, choice: u8, text: &[u8]| seed(name, [&[choice], text].concat());
    vec![
        of("create", 0, &serde_json::to_vec(&create).expect("plain data")),
        of("patch", 1, br#"{"metadata":{"a":null,"b":"c"},"ttl_seconds":null}"#),
        of("patch_empty", 1, b"{}"),
        of("command", 2, &serde_json::to_vec(&command).expect("plain data")),
        of("signal", 3, br#"{"signal":"TERM"}"#),
        of("folder", 4, br#"{"path":"/a","parents":true}"#),
        of("rename", 5, br#"{"from":"/a","to":"/b"}"#),
        of("build", 6, br#"{"source":"seed","name":"t"}"#),
        of("tag", 7, br#"{"tag":"t"}"#),
        of("key", 8, br#"{"name":"k"}"#),
    ]
}
