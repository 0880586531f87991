//! What is on disk of a template and of a run: written by the node, and read again after anything may have happened to it.

use std::collections::BTreeMap;

use serde_json::json;
use space_node::{Meta, Record};

use crate::{Seed, seed};

/// What is taken is the same after a round trip, and names nothing outside its place.
pub fn records(data: &[u8]) {
    if let Some(meta) = Meta::parse(data) {
        let own = serde_json::to_vec(&meta).expect("plain data");
        let again = Meta::parse(&own).expect("its own encoding");
        assert_eq!(serde_json::to_vec(&again).expect("plain data"), own);
        assert_eq!(again.digested(), meta.digested());
    }
    if let Some(record) = Record::parse(data) {
        let own = serde_json::to_vec(&record).expect("plain data");
        let again = Record::parse(&own).expect("its own encoding");
        assert_eq!(serde_json::to_vec(&again).expect("plain data"), own);
        assert!(!record.sandbox.as_str().contains(['/', '.', '\0']), "{}", record.sandbox);
    }
}

pub fn seeds() -> Vec<Seed> {
    let meta = Meta {
        format: 1,
        source: "seed".to_owned(),
        memory_mib: 512,
        vcpus: 1,
        disk_bytes: 2 << 30,
        disk_bytes_used: 300 << 20,
        memory_bytes_used: 60 << 20,
        start_command: String::new(),
        ready_command: "true".to_owned(),
        user: "user".to_owned(),
        workdir: "/home/user".to_owned(),
        env: BTreeMap::from([("LANG".to_owned(), "C.UTF-8".to_owned())]),
        entrypoint: vec![],
        cmd: vec!["sh".to_owned()],
        kernel: "6.1.0".to_owned(),
        vmm: "QEMU 7.2".to_owned(),
        compatibility: "vmm=qemu state=7.2".to_owned(),
        guest_protocol: 1,
        created_unix_ms: 1_700_000_000_000,
        build_id: "op-01h455vb4pex5vsknk084sn02q".to_owned(),
    };
    let record = json!({
        "sandbox": "sbx-01h455vb4pex5vsknk084sn02q", "run": 1, "generation": 2, "template": "sha256:00", "memory_mib": 512,
        "slot": 3, "cgroup": "sbx-01h455vb4pex5vsknk084sn02q", "started_unix_ms": 5, "vmm": null,
        "confirmed": true,
    });
    let text = serde_json::to_vec(&meta).expect("plain data");
    let other_format = serde_json::to_vec(&Meta { format: 2, ..meta }).expect("plain data");
    vec![
        seed("meta", text.clone()),
        seed("meta_torn", &text[..text.len() / 2]),
        seed("meta_other_format", other_format),
        seed("record", record.to_string()),
    ]
}
