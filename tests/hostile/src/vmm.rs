//! What a VMM says: lines of QEMU's monitor, answers of Firecracker's HTTP interface and of its program.

use serde_json::json;
use space_vmm::VmmError;
use space_vmm::firecracker::Version;
use space_vmm::firecracker::api::{self, ANSWER_MAX_BYTES, FAULT_MAX_CHARS};
use space_vmm::qemu::qmp::{ERROR_MAX_CHARS, Line, REASON_MAX_CHARS};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{Seed, run, seed};

/// Texts are bounded, and an answer is one to the number it has.
pub fn qmp(data: &[u8]) {
    for line in data.split_inclusive(|byte| *byte == b'\n') {
        match Line::parse(line) {
            Some(Line::Answer { id, result }) => {
                if let Err(text) = &result {
                    assert!(text.chars().count() <= ERROR_MAX_CHARS);
                }
                let own = match &result {
                    Ok(value) => json!({"return": value, "id": id}),
                    Err(text) => json!({"error": {"desc": text}, "id": id}),
                };
                let again = Line::parse(own.to_string().as_bytes());
                let Some(Line::Answer { id: again_id, result: again }) = again else { panic!("{own} is no answer") };
                assert_eq!((again_id, again.is_ok()), (id, result.is_ok()));
            }
            Some(Line::Shutdown(reason)) => assert!(reason.chars().count() <= REASON_MAX_CHARS),
            Some(Line::Migration(_)) | None => {}
        }
    }
}

pub fn qmp_seeds() -> Vec<Seed> {
    let greeting = json!({"QMP": {"version": {"qemu": {"major": 7}}, "capabilities": ["oob"]}});
    let lines = [
        ("greeting", greeting),
        ("answer", json!({"return": {"status": "running", "running": true}, "id": 1})),
        ("empty", json!({"return": {}, "id": 2})),
        ("error", json!({"id": 3, "error": {"class": "GenericError", "desc": "no such device"}})),
        ("completed", json!({"event": "MIGRATION", "data": {"status": "completed"}})),
        ("failed", json!({"event": "MIGRATION", "data": {"status": "failed"}})),
        ("shutdown", json!({"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-shutdown"}})),
    ];
    let mut seeds: Vec<Seed> = lines.iter().map(|(name, line)| seed(name, format!("{line}\r\n"))).collect();
    seeds.push(seed("all", lines.map(|(_, line)| format!("{line}\r\n")).concat()));
    seeds
}

fn check_error(error: &VmmError) {
    match error {
        VmmError::Refused { message, .. } => {
            assert!(message.chars().count() <= FAULT_MAX_CHARS, "{} characters", message.len());
            assert!(!message.contains(char::is_control), "{message:?}");
        }
        VmmError::Disconnected { .. } => {}
        other => panic!("{other}"),
    }
}

/// An answer of any bytes is a bounded body or a bounded error without control characters, and never keeps us waiting
/// after the other side has closed.
pub fn firecracker(data: &[u8]) {
    let answer = run(async {
        let (ours, mut theirs) = tokio::io::duplex(16 << 10);
        let data = data.to_vec();
        tokio::spawn(async move {
            let mut request = [0; 1024];
            let _ = theirs.read(&mut request).await;
            let _ = theirs.write_all(&data).await;
        });
        api::ask(ours, "the state", "/").await
    });
    match answer {
        Ok(body) => {
            assert!(body.len() <= ANSWER_MAX_BYTES);
            state(&body);
        }
        Err(error) => check_error(&error),
    }
    state(data);
    if let Some(version) = std::str::from_utf8(data).ok().and_then(Version::find) {
        assert_eq!(Version::find(&format!("v{version}")), Some(version));
    }
}

fn state(body: &[u8]) {
    if let Err(error) = api::state_of(body) {
        check_error(&error);
    }
}

pub fn firecracker_seeds() -> Vec<Seed> {
    let answer = |status: &str, body: &str| {
        let head = "Server: Firecracker API\r\nConnection: keep-alive\r\nContent-Type: application/json";
        format!("HTTP/1.1 {status}\r\n{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let instance = r#"{"id":"anonymous-instance","state":"Running","vmm_version":"1.16.1","app_name":"Firecracker"}"#;
    vec![
        seed("state", answer("200 OK", instance)),
        seed("instance", instance),
        seed("nothing", "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"),
        seed("fault", answer("400 Bad Request", r#"{"fault_message":"The requested operation\nis not supported"}"#)),
        seed("fault_nonsense", answer("502 Bad Gateway", "<html>\u{7}")),
        seed("chunked", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
        seed("endless", answer("200 OK", "").replace("Content-Length: 0", "Content-Length: 99999999999")),
        seed("text_for_an_object", answer("200 OK", &format!("\"{}\"", "x".repeat(3000)))),
        seed("version", "Firecracker v1.16.1\n"),
    ]
}
