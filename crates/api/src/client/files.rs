//! Files and folders of a sandbox, streamed in constant memory: a body is read and sent as the other side takes it.

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use reqwest::{Method, Response};

use super::{ANSWER_TIMEOUT, Client, ClientError, Result};
use crate::{ArchiveResult, FileInfo, FileList, MakeDirectory, RenameFile};

/// A place in a sandbox, and whose rights are used.
#[derive(Clone, Debug, Default)]
pub struct FileTarget {
    pub path: String,
    /// Name or uid; the template's user when absent.
    pub user: Option<String>,
}

impl FileTarget {
    fn query(&self) -> Vec<(&'static str, String)> {
        let mut query = vec![("path", self.path.clone())];
        query.extend(self.user.clone().map(|user| ("user", user)));
        query
    }
}

/// A body that is being received.
pub struct Download {
    /// Bytes, where the server said so.
    pub size: Option<u64>,
    answer: Response,
    url: String,
}

impl Download {
    /// The next piece, or `None` at the end. A connection that breaks before the end is an error.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        self.answer
            .chunk()
            .await
            .map_err(|e| ClientError::Broken { url: self.url.clone(), reason: super::error::chain(&e) })
    }
}

impl Client {
    pub async fn file_info(&self, sandbox: &str, target: &FileTarget) -> Result<FileInfo> {
        self.get(&["sandboxes", sandbox, "files", "info"], &target.query()).await
    }

    /// One page of a folder, sorted by name; `after` is `next_after` of the page before.
    pub async fn list_files(&self, sandbox: &str, target: &FileTarget, after: Option<String>) -> Result<FileList> {
        let mut query = target.query();
        query.extend(after.map(|after| ("after", after)));
        self.get(&["sandboxes", sandbox, "files", "list"], &query).await
    }

    pub async fn make_directory(&self, sandbox: &str, body: &MakeDirectory) -> Result<FileInfo> {
        self.post(&["sandboxes", sandbox, "files", "mkdir"], body).await
    }

    pub async fn rename_file(&self, sandbox: &str, body: &RenameFile) -> Result<FileInfo> {
        self.post(&["sandboxes", sandbox, "files", "rename"], body).await
    }

    /// `recursive`: a folder with what is in it.
    pub async fn remove_file(&self, sandbox: &str, target: &FileTarget, recursive: bool) -> Result<()> {
        let mut query = target.query();
        if recursive {
            query.push(("recursive", "true".into()));
        }
        let request = self.request(Method::DELETE, &["sandboxes", sandbox, "files"], &query);
        self.send(request.timeout(ANSWER_TIMEOUT)).await.map(drop)
    }

    /// Bytes `from..` of a file.
    pub async fn read_file(&self, sandbox: &str, target: &FileTarget, from: u64) -> Result<Download> {
        let mut request = self.request(Method::GET, &["sandboxes", sandbox, "files"], &target.query());
        if from > 0 {
            request = request.header(http::header::RANGE, format!("bytes={from}-"));
        }
        self.download(request).await
    }

    /// Appears under its name only when the whole body has arrived. `mode` is octal; `size` lets a file that cannot fit be refused at once.
    pub async fn write_file<S, E>(
        &self,
        sandbox: &str,
        target: &FileTarget,
        mode: Option<u32>,
        size: Option<u64>,
        body: S,
    ) -> Result<FileInfo>
    where
        S: Stream<Item = Result<Bytes, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    {
        let mut query = target.query();
        query.extend(mode.map(|mode| ("mode", format!("{mode:o}"))));
        let mut request = self.request(Method::PUT, &["sandboxes", sandbox, "files"], &query);
        if let Some(size) = size {
            request = request.header(http::header::CONTENT_LENGTH, size);
        }
        let request = request.header(http::header::CONTENT_TYPE, "application/octet-stream");
        self.json(request.body(reqwest::Body::wrap_stream(body.map(|chunk| chunk.map_err(Into::into))))).await
    }

    /// A folder (or file) as a tar stream; the names in it are relative to the path.
    pub async fn read_archive(&self, sandbox: &str, target: &FileTarget) -> Result<Download> {
        self.download(self.request(Method::GET, &["sandboxes", sandbox, "archive"], &target.query())).await
    }

    /// Unpacks a tar stream into a folder, which is made when it is missing.
    pub async fn write_archive<S, E>(&self, sandbox: &str, target: &FileTarget, body: S) -> Result<ArchiveResult>
    where
        S: Stream<Item = Result<Bytes, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    {
        let request = self
            .request(Method::PUT, &["sandboxes", sandbox, "archive"], &target.query())
            .header(http::header::CONTENT_TYPE, "application/x-tar");
        self.json(request.body(reqwest::Body::wrap_stream(body.map(|chunk| chunk.map_err(Into::into))))).await
    }

    /// Output of a command that is still held, from an offset on; both streams together.
    pub async fn output(&self, sandbox: &str, command: &str, offset: u64) -> Result<Download> {
        let segments = ["sandboxes", sandbox, "processes", command, "output"];
        self.download(self.request(Method::GET, &segments, &[("offset", offset.to_string())])).await
    }

    /// The tail of what the guest's kernel wrote to its console.
    pub async fn console(&self, sandbox: &str) -> Result<Download> {
        self.download(self.request(Method::GET, &["sandboxes", sandbox, "console"], &[])).await
    }

    async fn download(&self, request: reqwest::RequestBuilder) -> Result<Download> {
        let answer = self.send(request).await?;
        Ok(Download { size: answer.content_length(), answer, url: self.url().to_owned() })
    }
}
