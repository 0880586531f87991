//! The description of the API is true: it has exactly the routes that are served, it is valid, and every operation in it
//! asks for a key and for the right scope.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::Cloud;

const METHODS: [&str; 7] = ["get", "put", "post", "delete", "patch", "head", "options"];

fn document() -> Value {
    serde_json::to_value(space_control::openapi()).expect("JSON")
}

/// Method, path, operation.
fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let mut all = Vec::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        for method in METHODS {
            if let Some(operation) = item.get(method) {
                all.push((method.to_owned(), path.clone(), operation.clone()));
            }
        }
    }
    all
}

#[test]
fn described_is_served_and_served_is_described() {
    let described: BTreeSet<_> = operations(&document()).into_iter().map(|(m, p, _)| (p, m)).collect();
    let served: BTreeSet<_> = space_control::ROUTES
        .iter()
        .flat_map(|(path, methods)| methods.iter().map(|m| ((*path).to_owned(), (*m).to_owned())))
        .collect();
    assert_eq!(described, served);
}

#[test]
fn every_reference_resolves_and_every_id_is_unique() {
    fn visit(value: &Value, document: &Value, seen: &mut usize) {
        match value {
            Value::Object(map) => {
                if let Some(Value::String(target)) = map.get("$ref") {
                    let pointer = target.strip_prefix('#').expect("a local reference");
                    assert!(document.pointer(pointer).is_some(), "{target} leads nowhere");
                    *seen += 1;
                }
                map.values().for_each(|v| visit(v, document, seen));
            }
            Value::Array(list) => list.iter().for_each(|v| visit(v, document, seen)),
            _ => {}
        }
    }
    let document = document();
    assert!(document["openapi"].as_str().is_some_and(|v| v.starts_with("3.1")));
    let mut seen = 0;
    visit(&document, &document, &mut seen);
    assert!(seen > 50, "only {seen} references");
    let mut ids = BTreeSet::new();
    for (method, path, operation) in operations(&document) {
        let id = operation["operationId"].as_str().unwrap_or("").to_owned();
        assert!(ids.insert(id.clone()), "{method} {path}: operationId {id} twice");
        let text = operation["summary"].as_str().or(operation["description"].as_str());
        assert!(text.is_some_and(|t| !t.is_empty()), "{method} {path} says nothing");
    }
}

fn validator() -> Option<PathBuf> {
    let venv = std::env::var_os("SPACE_TEST_VENV")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/venv"), PathBuf::from);
    let own = venv.join("bin/python");
    [own, PathBuf::from("python3")].into_iter().find(|python| {
        let check = Command::new(python).args(["-c", "import openapi_spec_validator"]).output();
        check.is_ok_and(|out| out.status.success())
    })
}

#[test]
fn a_validator_of_others_finds_nothing() {
    let Some(python) = validator() else {
        println!("SKIP: no Python with openapi-spec-validator (SPACE_TEST_VENV names its environment)");
        return;
    };
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), document().to_string()).expect("written");
    let script = "import json, sys, openapi_spec_validator as v; v.validate(json.load(open(sys.argv[1])))";
    let out = Command::new(python).args(["-c", script]).arg(file.path()).output().expect("python runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

fn concrete(path: &str) -> String {
    path.replace("{id}", "nothing").replace("{command}", "nothing").replace("{reference}", "nothing")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_asks_for_a_key_and_its_scope() {
    let mut cloud = Cloud::start().await;
    let made = cloud.call("POST", "/v1/keys", Some(json!({"name": "r", "scope": "read"}))).await;
    let read = made.text("secret");
    let mut checked = 0;
    for (method, path, operation) in operations(&document()) {
        let open = operation["security"] == json!([{}]);
        assert_eq!(open, ["/v1/health", "/openapi.json"].contains(&path.as_str()), "{method} {path}");
        let address = format!("{}{}", cloud.url, concrete(&path));
        let verb: reqwest::Method = method.to_uppercase().parse().expect("a method");
        let answer = cloud.http.request(verb.clone(), &address).send().await.expect("sent");
        if open {
            assert_eq!(answer.status(), 200, "{method} {path}");
            continue;
        }
        assert_eq!(answer.status(), 401, "{method} {path} without a key");
        let wrong = format!("sk-{}", "A".repeat(43));
        let answer = cloud.http.request(verb.clone(), &address).bearer_auth(wrong).send().await.expect("sent");
        assert_eq!(answer.status(), 401, "{method} {path} with an unknown key");
        cloud.key.clone_from(&read);
        let answer = cloud.call(&method.to_uppercase(), &concrete(&path), Some(json!({}))).await;
        if method == "get" && !path.starts_with("/v1/keys") {
            assert_ne!(answer.status, 403, "{method} {path} with a key to read");
            assert_ne!(answer.status, 401, "{method} {path} with a key to read");
        } else {
            assert_eq!(answer.status, 403, "{method} {path} with a key to read: {answer:?}");
        }
        checked += 1;
    }
    assert!(checked > 20, "only {checked} operations");
}
