//! The way to the node: one gRPC channel, and what its refusals mean to a user of the API.
//!
//! Calls to a guest go the same way with the run in their metadata; the node passes them on. A code of the node is turned
//! into a code of the API here and nowhere else.

use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use space_api::Problem;
use space_api::problem::Code;
use space_core::RunRef;
use space_core::limits::GRPC_MESSAGE_MAX_BYTES;
use space_proto::guest::guest_client::GuestClient;
use space_proto::node::node_client::NodeClient;
use space_proto::{META_GENERATION, META_RUN, META_SANDBOX};
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Request, Status};

use crate::ControlError;

/// A call that only looks, or ends something.
pub const SHORT: Duration = Duration::from_secs(15);
/// A start waits in the node's line before it is worked on.
pub const START: Duration = Duration::from_secs(240);
/// A removal waits for the VM to be gone.
pub const DELETE: Duration = Duration::from_secs(60);
/// Text of the node or of a guest that is passed on.
const MESSAGE_MAX_CHARS: usize = 2000;

/// Where the node listens.
#[derive(Clone, Debug)]
pub enum NodeEndpoint {
    /// A unix socket; it may appear later, and again after the node has restarted.
    Unix(PathBuf),
    Channel(Channel),
}

impl NodeEndpoint {
    /// Connects when first used, and again whenever the connection is lost.
    pub(crate) fn channel(&self) -> Result<Channel, ControlError> {
        let path = match self {
            Self::Channel(channel) => return Ok(channel.clone()),
            Self::Unix(path) => path.clone(),
        };
        let endpoint = Endpoint::try_from("http://node.invalid").map_err(|e| ControlError::Node(e.to_string()))?;
        let endpoint = endpoint
            .connect_timeout(Duration::from_secs(5))
            .initial_stream_window_size(512 * 1024)
            .initial_connection_window_size(2 * 1024 * 1024);
        Ok(endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        })))
    }
}

#[derive(Clone)]
pub struct Node(Channel);

impl Node {
    pub fn new(channel: Channel) -> Self {
        Self(channel)
    }

    pub fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.0.clone())
            .max_decoding_message_size(GRPC_MESSAGE_MAX_BYTES)
            .max_encoding_message_size(GRPC_MESSAGE_MAX_BYTES)
    }

    pub fn guest(&self) -> GuestClient<Channel> {
        GuestClient::new(self.0.clone())
            .max_decoding_message_size(GRPC_MESSAGE_MAX_BYTES)
            .max_encoding_message_size(GRPC_MESSAGE_MAX_BYTES)
    }
}

pub fn run_ref(run: &RunRef) -> space_proto::node::RunRef {
    space_proto::node::RunRef { sandbox: run.sandbox.to_string(), run: run.run.0, generation: run.generation.0 }
}

/// A call with a deadline.
pub fn timed<T>(message: T, limit: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(limit);
    request
}

/// A call to the guest of a run. `limit: None` for streams, whose time is the size of what they carry.
pub fn to_guest<T>(run: &RunRef, message: T, limit: Option<Duration>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(limit) = limit {
        request.set_timeout(limit);
    }
    let ascii = |text: String| AsciiMetadataValue::try_from(text).expect("ids and numbers are ASCII");
    let meta = request.metadata_mut();
    meta.insert(META_SANDBOX, ascii(run.sandbox.to_string()));
    meta.insert(META_RUN, ascii(run.run.to_string()));
    meta.insert(META_GENERATION, ascii(run.generation.to_string()));
    request
}

/// What others wrote, cut to a length and without control characters.
pub fn passed_on(text: &str) -> String {
    text.chars().take(MESSAGE_MAX_CHARS).map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}

/// Whether the channel itself failed, rather than the other side answering.
fn is_transport(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.is::<tonic::transport::Error>() || error.is::<hyper_util::client::legacy::Error>() {
            return true;
        }
        source = error.source();
    }
    false
}

/// Whether the time of a call was up, on either side. The call may have been carried out.
pub fn is_timeout(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.is::<tonic::TimeoutExpired>() {
            return true;
        }
        source = error.source();
    }
    status.code() == tonic::Code::DeadlineExceeded
}

/// Whether trying again may help: nobody there, or the connection broke. The call may have been carried out.
pub fn is_transient(status: &Status) -> bool {
    let broken = matches!(status.code(), tonic::Code::Unavailable | tonic::Code::Cancelled | tonic::Code::Unknown);
    broken && !is_timeout(status)
}

/// The meaning of a refusal by the node itself.
pub fn node_problem(status: &Status) -> Problem {
    use tonic::Code as Grpc;
    let said = passed_on(status.message());
    let (code, detail) = match status.code() {
        _ if is_timeout(status) => (Code::Timeout, "the node did not answer in time".to_owned()),
        Grpc::NotFound => (Code::NotFound, said),
        Grpc::InvalidArgument | Grpc::OutOfRange => (Code::InvalidRequest, said),
        Grpc::ResourceExhausted => (Code::NoCapacity, said),
        Grpc::FailedPrecondition | Grpc::Aborted | Grpc::AlreadyExists => (Code::Conflict, said),
        Grpc::Unavailable | Grpc::Cancelled => {
            (Code::Unavailable, format!("the node cannot be reached; try again in a moment ({said})"))
        }
        _ if is_transport(status) => (Code::Unavailable, format!("the connection to the node broke ({said})")),
        _ => (Code::Internal, format!("the node reported a fault: {said}")),
    };
    Problem::new(code, detail)
}

/// The meaning of a refusal by a guest, or by the node in its place. `files`: of a call about files.
pub fn guest_problem(status: &Status, files: bool) -> Problem {
    use tonic::Code as Grpc;
    let said = passed_on(status.message());
    if is_transport(status) && !is_timeout(status) {
        return node_problem(status);
    }
    let misdirected = said.starts_with("misdirected");
    let (code, detail) = match status.code() {
        _ if is_timeout(status) => (Code::Timeout, "the sandbox did not answer in time".to_owned()),
        Grpc::FailedPrecondition if misdirected => {
            (Code::NotRunning, format!("the sandbox has just stopped or moved; look at its state ({said})"))
        }
        Grpc::NotFound if files => (Code::FileNotFound, said),
        Grpc::NotFound => (Code::NotFound, said),
        Grpc::PermissionDenied if files => (Code::FilePermission, said),
        Grpc::PermissionDenied => (Code::Forbidden, said),
        Grpc::AlreadyExists if files => (Code::FileExists, said),
        Grpc::AlreadyExists => (Code::Conflict, said),
        Grpc::FailedPrecondition if files => (Code::FileKind, said),
        Grpc::FailedPrecondition | Grpc::Aborted => (Code::Conflict, said),
        Grpc::ResourceExhausted if files => (Code::GuestDiskFull, said),
        Grpc::ResourceExhausted => (Code::GuestLimit, said),
        Grpc::OutOfRange if files => (Code::RangeNotSatisfiable, said),
        Grpc::InvalidArgument | Grpc::OutOfRange => (Code::InvalidRequest, said),
        Grpc::Unavailable | Grpc::Cancelled => {
            (Code::GuestUnreachable, format!("the sandbox does not answer; look at its state, or try again ({said})"))
        }
        Grpc::Unimplemented => {
            (Code::Conflict, "the daemon in this sandbox is older than this call; rebuild its template".to_owned())
        }
        _ => (Code::Internal, format!("the sandbox reported a fault: {said}")),
    };
    Problem::new(code, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_keep_their_meaning() {
        let code = |status: Status, files: bool| guest_problem(&status, files).code;
        assert_eq!(code(Status::not_found("x"), true), "file_not_found");
        assert_eq!(code(Status::not_found("x"), false), "not_found");
        assert_eq!(code(Status::resource_exhausted("x"), true), "guest_disk_full");
        assert_eq!(code(Status::resource_exhausted("x"), false), "guest_limit");
        assert_eq!(code(Status::failed_precondition("misdirected: no such run"), true), "not_running");
        assert_eq!(node_problem(&Status::resource_exhausted("x")).code, "no_capacity");
        assert_eq!(passed_on("a\u{1b}[31mb\0"), "a\u{fffd}[31mb\u{fffd}");
    }

    #[tokio::test]
    async fn nobody_there_is_unavailable_and_not_the_guest() {
        let node = Node::new(NodeEndpoint::Unix("/nonexistent/node.sock".into()).channel().expect("lazy"));
        let status = node.guest().info(space_proto::guest::InfoRequest {}).await.expect_err("nobody listens");
        assert!(is_transient(&status), "{status:?}");
        assert_eq!(guest_problem(&status, true).code, "unavailable", "{status:?}");
    }
}
